"""What the scripts for a GPU host make of logs and metrics; the scripts themselves run with `--device cpu`, too."""

import json
import re
import shlex
import subprocess

from benchmarks.random_model import SIZES, dimensions, prompt
from benchmarks.weight_sync_gpu import WAYS, floors
from scripts import gpu_main
from scripts.gpu_main import Job, printed, row, text


def test_a_row_tells_what_a_job_has_measured(tmp_path):
    (tmp_path / "ipc-hf").mkdir()
    metrics = [{"train/loss": 1.0, "perf/step_seconds": s, "sync/bytes": 2**30} for s in (9.0, 1.0, 3.0)]
    (tmp_path / "ipc-hf" / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (tmp_path / "ipc-hf.log").write_text("start\nSyncError: it broke\n  where:  there\n")
    (tmp_path / "ipc-hf" / "logs").mkdir()
    (tmp_path / "ipc-hf" / "logs" / "engine-0.log").write_text(
        "INFO x\nE ValueError: no memory\nRuntimeError: see above\n"
    )
    job = Job("ipc-hf", [], steps=10, seconds=5.0, code=1)
    job.process = object()
    found = row(job, tmp_path)
    assert found["median"]["perf/step_seconds"] == 2.0 and found["first"]["perf/step_seconds"] == 9.0
    assert not found["passed"] and found["error"] == "SyncError: it broke"
    assert found["cause"] == "engine-0.log: E ValueError: no memory" and found["cause"] in text(found)
    assert "step 2.000 (9.000)" in text(found) and "bytes 1.00" in text(found)
    assert row(Job("4b", [], steps=2), tmp_path)["error"] == "not run"


def test_figures_that_tests_print_are_in_the_table(tmp_path):
    log = "..\n___ test_a ___\n--- Captured stdout call ---\nsync 3 ms\n--- Captured stderr call ---\nnoise\n2 passed"
    assert printed(log.splitlines()) == ["sync 3 ms", "2 passed"]


def test_jobs_are_commands_of_instep_and_of_pytest(tmp_path, monkeypatch):
    words = ["gpu_main.py", "--out", str(tmp_path), "--list"]
    monkeypatch.setattr("sys.argv", words)
    assert gpu_main.main() == 0
    assert {job.name for job in gpu_main.tests(["nccl"], tmp_path)} == {"test_nccl"}


def test_models_have_their_published_sizes():
    for size, billions in (("0.6b", 0.596), ("4b", 4.022), ("8b", 8.19)):
        d = dimensions(size)
        attention = d["hidden_size"] * d["head_dim"] * 2 * (d["num_attention_heads"] + d["num_key_value_heads"])
        layer = attention + 3 * d["hidden_size"] * d["intermediate_size"]
        heads = 1 if d["tie_word_embeddings"] else 2
        total = d["num_hidden_layers"] * layer + heads * d["vocab_size"] * d["hidden_size"]
        assert abs(total / 1e9 - billions) < 0.01, size
    assert len(prompt(128, 512, 0).split()) == 128 and set(SIZES) >= {"tiny", "0.6b", "4b", "8b"}


def test_floors_are_those_of_the_bytes_that_a_way_moves():
    machine = {"copy_gb_per_s": 3000.0, "broadcast_gb_per_s": 366.0}
    assert abs(floors("single-copy", 600_000_000, machine)["floor"] - 0.0012) < 1e-6
    assert abs(floors("nccl", 4_000_000_000, machine)["floor"] - 0.02186) < 1e-4
    assert "floor" not in floors("ipc", 1, machine)


def test_the_items_of_a_session_name_what_there_is_and_end_before_their_limit(tmp_path):
    """A job that reaches its own limit still writes what it has measured; one that is ended does not."""
    script = gpu_main.ROOT / "scripts" / "gpu_session.sh"
    items = subprocess.run([str(script), "items"], capture_output=True, text=True, check=True).stdout.splitlines()
    limits = {name: int(limit) for name, limit, *_ in map(str.split, items)}
    bodies = dict(re.findall(r"^item_(\w+)\(\) \{[^\n]*\n(.*?)^\}", script.read_text(), re.M | re.S))
    assert limits.keys() == bodies.keys() and max(limits.values()) <= 600
    tested = set()
    for name, body in bodies.items():
        words = shlex.split(body.replace("\\\n", " "))
        given = {flag: words[words.index(flag) + 1 :] for flag in ("--only", "--tests", "--limit") if flag in words}
        values = {
            f: [v for v in vs[: next((i for i, v in enumerate(vs) if v[:2] == "--"), None)]] for f, vs in given.items()
        }
        if "benchmarks/weight_sync.py" in words:
            assert all(size in SIZES and way in WAYS for size, _, way in (v.partition(":") for v in values["--only"]))
        elif "scripts/gpu_main.py" in words:
            assert set(values.get("--only", ())) <= set(gpu_main.WAYS)
            assert all(gpu_main.tests([word], tmp_path) for word in values.get("--tests", ()))
            tested |= (
                {job.name for job in gpu_main.tests(values["--tests"], tmp_path)} if "--tests" in values else set()
            )
        else:
            continue
        assert int(values["--limit"][0]) < limits[name], name
    own_item = {
        "test_atropos_guide",
        "test_attention",
        "test_decode_kernels",
        "test_megatron_parallel",
        "test_sglang_drafter",
        "test_trl",
    }
    assert {job.name for job in gpu_main.tests([], tmp_path)} == tested | own_item

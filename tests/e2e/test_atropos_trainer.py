"""`instep atropos-train` as a process, fed by an API that speaks Atropos' protocol (`atropos_feeder.py`)."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest
from safetensors.torch import load_file

from instep.errors import EngineError
from instep.system.ports import free_port
from instep_engine.guard import EVERYONE, GENERATE_VARIABLE, KEY_VARIABLE
from tests.assets import make_checkpoint
from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT

SERVED = {KEY_VARIABLE: "of-a-test", GENERATE_VARIABLE: EVERYONE}  # as `instep atropos-serve` serves
EMBEDDED = [sys.executable, "-m", "tests.e2e.atropos_embedded"]


@contextlib.contextmanager
def feeder(port: int, engine: str | None = None) -> Iterator[None]:
    more = ["--engine", engine] if engine else []
    process = subprocess.Popen([sys.executable, "-m", "tests.e2e.atropos_feeder", "--port", str(port), *more])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def words(model: Path, folder: Path, engine: int, api: int, *more: str) -> list[str]:
    out = ["--model-name", model, "--vllm-port", engine, "--atropos-url", f"http://127.0.0.1:{api}", "--lr", "1e-2"]
    out += ["--save-path", folder, "--dtype", "float32", "--device", "cpu", "--batch-size", 2]
    return [*map(str, out), *more]


def rows(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "train/loss" in row]


def check_output(out: str, save: Path, last: str, session: int = 1) -> None:
    """What a run of four steps says and leaves, with two steps between two updates of the engine, and --resume."""
    assert "Step 3/4" in out and "Step 4/4" in out and ("Step 1/4" in out) is (session == 1), out[-3000:]
    assert "Training finished." in out and "BENCHMARK SUMMARY" in out
    prefix = "adapter_step" if last == "final_adapter" else "step"
    assert sorted(p.name for p in save.glob(f"{prefix}_*")) == [f"{prefix}_2", f"{prefix}_4"]
    name = "adapter_model.safetensors" if prefix == "adapter_step" else "model.safetensors"
    before, after = (load_file(save / f"{prefix}_{n}" / name) for n in (2, 4))
    assert before.keys() == after.keys() and any(not before[key].equal(after[key]) for key in before)
    assert (save / last / name).read_bytes() == (save / f"{prefix}_4" / name).read_bytes()
    assert [p.name for p in (save / "resume").glob("iter_*")] == ["iter_0000003"]  # the newest alone


@pytest.mark.slow
def test_a_run_with_an_engine_of_its_own(tiny: Path, tmp_path: Path) -> None:
    """A second session goes on."""
    engine, api, save = free_port(), free_port(), tmp_path / "out"
    flags = ["--weight-bridge-mode", "none", "--gradient-accumulation-steps", "4", "--vllm-restart-interval", "2"]
    flags += ["--benchmark", "--resume"]
    with feeder(api, f"http://127.0.0.1:{engine}"):
        command = [*EMBEDDED, *words(tiny / "hf", save, engine, api, *flags)]
        done = [
            subprocess.run([*command, "--training-steps", str(n)], env=ENVIRONMENT, capture_output=True, text=True)
            for n in (2, 4)
        ]
    assert not any(d.returncode for d in done), done[-1].stderr[-2000:] + done[0].stderr[-2000:]
    check_output(done[-1].stdout, save, "final_model", session=2)


@pytest.mark.slow
def test_ranks_that_are_started_by_hand_reduce_their_gradients(tiny: Path, tmp_path: Path) -> None:
    """Two ranks on a batch make the steps that one rank makes on it."""
    found = []
    for size, accumulate in ((1, "4"), (2, "2")):
        engine, api, save = free_port(), free_port(), tmp_path / f"of-{size}"
        flags = ["--gradient-accumulation-steps", accumulate, "--training-steps", "4", "--vllm-restart-interval", "2"]
        flags += ["--benchmark", "--resume"]
        command = [*EMBEDDED, *words(tiny / "hf", save, engine, api, "--weight-bridge-mode", "lora_restart", *flags)]
        command += ["--world-size", str(size)]
        with feeder(api):
            others = [
                subprocess.Popen([*command, "--trainer-rank", str(rank)], env=ENVIRONMENT, stdout=subprocess.PIPE)
                for rank in range(1, size)
            ]
            done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
            said = [(other.communicate(timeout=240)[0].decode(), other.returncode) for other in others]
        assert done.returncode == 0, done.stderr[-2000:] + str(said)
        assert all("has joined rank 0" in text and code == 0 for text, code in said), said
        check_output(done.stdout, save, "final_adapter")
        found.append(rows(save))
    for alone, together in zip(*found, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name
    assert found[0][0]["train/grad_norm"] > 0


@pytest.mark.slow
def test_the_death_of_a_rank_that_joined_is_named(tiny: Path, tmp_path: Path) -> None:
    engine, api = free_port(), free_port()
    flags = ["--weight-bridge-mode", "lora_restart", "--training-steps", "1000", "--world-size", "2"]
    command = [*EMBEDDED, *words(tiny / "hf", tmp_path / "out", engine, api, *flags)]
    command += ["--gradient-accumulation-steps", "2", "--vllm-restart-interval", "1"]
    with feeder(api):
        other = subprocess.Popen([*command, "--trainer-rank", "1"], env=ENVIRONMENT)
        first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "out/metrics.jsonl").exists() or not rows(tmp_path / "out"):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        other.send_signal(signal.SIGKILL)
        began = time.monotonic()
        _, error = first.communicate(timeout=240)
    assert first.returncode == 1 and "actor rank 1 (started by hand) has ended" in error, error
    assert time.monotonic() - began < allowed(20)
    other.wait()


@contextlib.contextmanager
def embedded_server(model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that is not the run's own, when it answers."""
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, env={**ENVIRONMENT, **SERVED})
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_death_of_the_users_server_ends_the_trainer_which_goes_on_with_the_next_one(tiny: Path, tmp_path) -> None:
    """No batch comes from environments whose server is gone: the trainer names it, and does not wait for one."""
    engine, api, save = free_port(), free_port(), tmp_path / "out"
    flags = ["--weight-bridge-mode", "lora_only", "--gradient-accumulation-steps", "4", "--resume", "--training-steps"]
    command = [*EMBEDDED, *words(tiny / "hf", save, engine, api, *flags)]
    more, env = ["--vllm-restart-interval", "2"], {**ENVIRONMENT, **SERVED}
    with feeder(api, f"http://127.0.0.1:{engine}"):
        with embedded_server(tiny / "hf", engine) as server:
            run = subprocess.Popen([*command, "1000", *more], env=env, stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 120
            while not list((save / "resume").glob("iter_*")):
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.1)
            server.kill()
            _, error = run.communicate(timeout=240)  # takes seconds, and some more on a busy machine
        trained = rows(save)
        assert run.returncode == EngineError.exit_code and f"127.0.0.1:{engine}" in error and "remedy:" in error, error
        steps = str(len(trained) + 2)
        with embedded_server(tiny / "hf", engine):
            done = subprocess.run([*command, steps, *more], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"Step {steps}/{steps}" in done.stdout and "Step 1/" not in done.stdout, done.stderr
    assert [row["step"] for row in rows(save)] == list(range(int(steps)))


def asked(url: str, key: str = "", **body: object) -> dict:
    """The answer to a POST with `body`, or to a GET without one."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


def check_adapters(url: str, file: Path, save: Path) -> None:
    """After a run of two syncs: `/lora/load` puts another adapter into the place of the trainer's, until it leaves."""
    key, prompt = file.read_text().strip(), {"prompt_token_ids": [5, 9, 30, 12, 41]}

    def scores() -> list[float]:
        found = asked(f"{url}/generate", prompt=prompt, prompt_logprobs=1, max_tokens=1, temperature=0)
        rows = (
            found["prompt_logprobs"][0] if isinstance(found["prompt_logprobs"][0], list) else found["prompt_logprobs"]
        )
        return [row[str(i)] for row, i in zip(rows[1:], prompt["prompt_token_ids"][1:], strict=True)]

    assert asked(f"{url}/bridge/info")["update_count"] >= 2
    with pytest.raises(urllib.error.HTTPError, match="401"):
        asked(f"{url}/lora/load", adapter_path=str(save / "adapter_step_2"))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(f"{url}/lora/load", key, adapter_path=str(save / "nowhere"))
    of_trainer = scores()
    loaded = asked(f"{url}/lora/load", key, adapter_path=str(save / "adapter_step_2"), adapter_name="two")
    assert (loaded["status"], loaded["adapter_name"], loaded["adapter_config"]["r"]) == ("ok", "two", 16)
    of_two = scores()
    asked(f"{url}/lora/load", key, adapter_path=str(save / "final_adapter"))
    assert scores() == pytest.approx(of_trainer, abs=0.02)
    assert of_two != pytest.approx(of_trainer, abs=0.02)
    assert asked(f"{url}/lora/status")["load_count"] == 2
    asked(f"{url}/lora/unload", key, now=True)
    assert scores() == of_trainer and asked(f"{url}/lora/status")["active_adapter_path"] is None
    asked(f"{url}/bridge/pause", key, mode="keep")
    assert asked(f"{url}/bridge/is_paused") == {"paused": True}
    asked(f"{url}/bridge/resume", key, now=True)
    asked(f"{url}/health_generate")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode,size,more",
    [
        ("shared_vllm", 2, ""),
        ("shared_vllm", 1, "--tensor-parallel-size 2"),
        ("lora_only", 1, ""),
        ("lora_only", 1, "--quantization fp8_per_channel"),
        ("lora_only", 1, "--tensor-parallel-size 1 --pipeline-parallel-size 2"),
    ],
)
def test_a_run_with_a_server_that_the_user_has_started(tmp_path: Path, mode: str, size: int, more: str) -> None:
    """`instep atropos-serve`, and a trainer of `size` ranks that finds its port, its key and its memory."""
    engine, api = free_port(), free_port()
    model, save = make_checkpoint(tmp_path / "hf", head_dim=32), tmp_path / "out"
    env = {**ENVIRONMENT, "LOGDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shared = mode == "shared_vllm"
    serve = [sys.executable, "-m", "instep.cli", "atropos-serve", "--model", str(model), "--port", str(engine)]
    serve += more.split() + ([] if shared else ["--enable-lora", "--max-lora-rank", "16"])
    log = tmp_path / "vllm.log"
    with log.open("w") as file:
        wish = {"VLLM_ENABLE_SHARED_WEIGHTS": "1"} if shared else {}
        server = subprocess.Popen(serve, env={**env, **wish}, stdout=file, stderr=file)
    try:
        began = time.monotonic()
        while "Uvicorn running on" not in log.read_text():
            assert server.poll() is None and time.monotonic() - began < allowed(200), log.read_text()[-3000:]
            time.sleep(0.5)
        assert "vllm_api_server" in Path(f"/proc/{server.pid}/cmdline").read_text()  # which `pkill -f` reads
        with feeder(api, f"http://127.0.0.1:{engine}"):
            flags = words(model, save, engine, api, "--weight-bridge-mode", mode, "--training-steps", "4")
            flags[flags.index("--dtype") + 1] = "bfloat16"
            flags += ["--vllm-restart-interval", "2", "--world-size", str(size)]
            flags += ["--gradient-accumulation-steps", str(4 // size)]
            train = [sys.executable, "-m", "instep.cli", "atropos-train", *flags]
            others = [subprocess.Popen([*train, "--trainer-rank", "1"], env=env)] if size > 1 else []
            done = subprocess.run(train, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            assert [other.wait(60) for other in others] == [0] * len(others)
        assert "Step 4/4" in done.stdout and (save / ("final_model" if shared else "final_adapter")).is_dir()
        if not shared:
            check_adapters(
                f"http://127.0.0.1:{engine}", tmp_path / f"cache/instep/servers/{gethostname()}-{engine}.key", save
            )
        attached = "[Setup] ✓ Attached 24 tensors to vLLM's shared memory"
        assert (attached in done.stdout) is shared and ("Exported 18 params" in log.read_text()) is shared
        assert ("Quantizing 8 layers" in log.read_text()) is ("--quantization" in more)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        server.kill()

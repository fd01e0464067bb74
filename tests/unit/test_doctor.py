"""`instep doctor`: this installation as it is, and folders of runs in the states a run can be left in."""

import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from instep.checkpoints.integrity import write_manifest
from instep.cli import main
from instep.errors import ConfigError
from instep.observability.versions import versions
from instep.preflight.doctor import installation, run_dir
from instep.preflight.doctor.run_dir import check_run


@pytest.fixture
def some_vllm(tmp_path, monkeypatch):
    """Its `vllm.py` in place of vLLM, whose import takes ten seconds."""
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\nRequires-Dist: torch==1.0\n"
    )
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "vllm.py"


@pytest.mark.vllm
def test_vllm_can_be_imported():
    assert installation._vllm().text.endswith("can be imported")


def test_an_installation(capsys, some_vllm):
    code = main(["doctor", "--json"])
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    names = "python,torch,transformers,gpu,vllm,shared memory,disk,open files,cores,memory,loopback,leftover folders,"
    names += "leftover processes"
    assert set(names.split(",")) <= set(checks)
    assert code == int(any(c["status"] == "fail" for c in checks.values()))
    import torch

    assert checks["torch"]["text"].split("+")[0] == torch.__version__.split("+")[0]  # of a CUDA build, too
    assert checks["python"]["status"] == checks["loopback"]["status"] == "ok"
    assert checks["cores"]["text"].startswith(f"{len(os.sched_getaffinity(0))} usable")


def test_a_vllm_that_cannot_be_imported_is_named(some_vllm):
    some_vllm.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    check = installation._vllm()
    assert check.status == "fail" and "0.32.0" in check.text and "libcudart.so.12" in check.text
    built = [c for c in installation._built_for_torch() if c.name == "vllm"]
    assert [c.status for c in built] == ["fail"] and "==1.0" in built[0].text
    some_vllm.write_text("")
    assert installation._vllm().text == "0.32.0, can be imported"


def test_limits_that_are_too_low_are_seen(monkeypatch):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        check = installation._files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.status == "warn" and "1024" in check.text and check.remedy.startswith("ulimit -n ")
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    assert ("OMP_NUM_THREADS", "warn") in {(c.name, c.status) for c in installation._cores()}
    monkeypatch.setattr(installation, "MIN_SHM", 1 << 60)
    monkeypatch.setattr(installation, "MIN_DISK", 1 << 60)
    assert installation._shm().status == "warn" and {c.status for c in installation._disks()} == {"warn"}


def test_an_orphan_is_found():
    """A shell that ends at once leaves its child, whose command line looks like an engine's, to process 1."""
    code = "import time; time.sleep(60)  # -m instep.engines.embedded"
    shell = [
        "sh",
        "-c",
        f'exec_python() {{ "{sys.executable}" -c "$1" & }}; exec_python "{code}" >/dev/null 2>&1; echo $!',
    ]
    pid = int(subprocess.run(shell, capture_output=True, text=True, timeout=10).stdout)
    try:
        if psutil.Process(pid).ppid() != 1 or "instep" in " ".join(psutil.Process(1).cmdline()):
            pytest.skip("orphans do not go to process 1 here, or a run is that process")
        check = next(c for c in installation._leftovers() if c.name == "leftover processes")
        assert check.status == "fail" and str(pid) in check.text and check.remedy.startswith("kill ")
    finally:
        os.kill(pid, 9)


STATE = {"rollout_id": 1, "num_steps": 2, "version": 3, "ledger": {}, "evaluations": [], "args": {}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder as a finished run leaves it, with one checkpoint; killed runs of other tests are not seen."""
    monkeypatch.setattr(run_dir, "roots", lambda folder: [folder])
    folder, save = tmp_path / "run", tmp_path / "ckpt"
    checkpoint = save / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (folder / "logs").mkdir(parents=True)
    dead = subprocess.Popen(["true"])
    dead.wait()
    process = {"pid": dead.pid, "host": socket.gethostname(), "started": time.time()}
    args = {"num_rollout": 2, "save": str(save), "train_backend": "hf"}
    config = {"title": "GRPO", "args": args, "versions": versions(), "process": process}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"step": i, "time": time.time(), "rollout/reward_mean": 0.5, "alarm/truncation": 0} for i in range(2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = {"num_issued": 8, "num_consumed": 8, "dropped": {}}
    (folder / "summary.json").write_text(json.dumps({"wall_seconds": 61.0, "ledger": ledger}))
    (checkpoint / ".metadata").write_bytes(b"x")
    (checkpoint / "__0_0.distcp").write_bytes(b"x")
    (checkpoint / "rng_0.pt").write_bytes(b"x")
    (checkpoint / "run_state.json").write_text(json.dumps(STATE))
    write_manifest(checkpoint)
    (save / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


def test_a_flipped_bit_and_a_state_that_lacks_an_entry(run, tmp_path):
    folder = tmp_path / "ckpt" / "iter_0000001"
    (folder / "__0_0.distcp").write_bytes(b"y")
    assert "__0_0.distcp has different content" in status_of(run)["iter_0000001"].text
    (folder / "run_state.json").write_text("{}")
    write_manifest(folder)
    assert "rollout_id is missing" in status_of(run)["iter_0000001"].text
    (folder / "run_state.json").write_text(json.dumps(STATE))
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "files.json"}
    (folder / "files.json").write_text(json.dumps(sizes))  # as an earlier instep did
    assert status_of(run)["iter_0000001"].text == "complete, by the sizes of its files"


def status_of(run):
    return {c.name: c for c in check_run(run)}


def test_a_finished_run_is_well(run, capsys):
    checks = status_of(run)
    assert {c.status for c in checks.values()} == {"ok"}, checks
    assert "finished after 01:01" in checks["state"].text and "8 consumed" in checks["ledger"].text
    assert checks["iter_0000001"].text == "complete" and "torch" in checks["versions"].text
    assert main(["doctor", str(run)]) == 0
    out = capsys.readouterr().out
    assert "latest_checkpointed_iteration.txt names 1" in out
    assert all(line.startswith(("ok  ", "warn", "FAIL", "    ")) for line in out.splitlines())


def test_a_killed_run_a_failed_one_and_a_living_one(run):
    (run / "summary.json").unlink()
    (run / "logs" / "engine-0.log").write_text("last words\n")
    state = status_of(run)["state"]
    assert state.status == "fail" and "has ended without" in state.text and "last words" in state.text
    (run / "logs" / "error.txt").write_text("2026\nEngineError: engine-0 died\n\nTraceback ...")
    state = status_of(run)["state"]
    assert state.status == "fail" and "EngineError: engine-0 died" in state.text and "Traceback" not in state.text
    config = json.loads((run / "config.json").read_text())
    config["process"] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": psutil.Process().create_time(),
    }
    (run / "config.json").write_text(json.dumps(config))
    state = status_of(run)["state"]
    assert state.status == "ok" and f"running as pid {os.getpid()}" in state.text
    assert f"kill -USR1 {os.getpid()}" in state.text
    config["process"]["started"] -= 1000  # the number has been given to another process since
    (run / "config.json").write_text(json.dumps(config))
    assert status_of(run)["state"].status == "fail"


def test_nan_alarms_and_damaged_metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1] |= {"train/loss": None, "alarm/truncation": 1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checks = status_of(run)
    assert checks["metrics"].status == "fail" and "train/loss in rollout 1" in checks["metrics"].text
    assert checks["alarms"].status == "warn" and checks["alarms"].text == "truncation (rollout 1)"
    (run / "metrics.jsonl").write_text('{"step": 0, "ti\n{"step": 1, "time": 1}\n')
    assert status_of(run)["metrics"].status == "fail"
    assert main(["doctor", str(run)]) == 1


def test_checkpoints_that_are_not_whole(run, tmp_path):
    folder = tmp_path / "ckpt" / "iter_0000001"
    (folder / "rng_0.pt").unlink()
    assert "rng_0.pt is missing" in status_of(run)["iter_0000001"].text
    (folder / "__0_0.distcp").write_bytes(b"")
    assert "__0_0.distcp has 0 bytes instead of 1" in status_of(run)["iter_0000001"].text
    (folder / "run_state.json").write_text("{")
    (folder / "files.json").unlink()
    write_manifest(folder)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "ckpt" / ".iter_0000002.tmp").mkdir()
    checks = status_of(run)
    assert checks["iter_0000001"].status == checks["latest checkpoint"].status == "fail"
    assert "run_state.json" in checks["iter_0000001"].text
    assert checks[".iter_0000002.tmp"].status == "warn"


def test_other_versions_are_told(run):
    config = json.loads((run / "config.json").read_text())
    config["versions"]["torch"] = "1.0"
    (run / "config.json").write_text(json.dumps(config))
    check = status_of(run)["versions"]
    assert check.status == "warn" and "torch 1.0, here " in check.text


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no config.json"):
        check_run(tmp_path)

"""How runs end when something goes wrong: one clear error, quickly, and no process left."""

import json
import os
import resource
import signal
import time

import psutil
import pytest

from tests.e2e.commands import grpo_arguments, run, start


def wait_for(condition, seconds, process):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    raise AssertionError("did not happen in time")


def in_rollout(run_dir):
    """A condition: at least one training step is done, so the engine is at work again."""
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and "train/loss" in path.read_text()


def children(pid):
    return psutil.Process(pid).children(recursive=True)


def gone_within(processes, seconds):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


LONG = ["--num-rollout", "1000", "--rollout-max-response-len", "100"]


def test_ctrl_c_ends_everything_with_130(tiny, tmp_path):
    process = start(grpo_arguments(tiny, tmp_path, *LONG))
    wait_for(in_rollout(tmp_path), 60, process)
    started, ours = time.monotonic(), children(process.pid)
    assert len(ours) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert gone_within(ours, max(0.1, 5 - (time.monotonic() - started)))
    assert time.monotonic() - started < 5
    process.communicate()


def test_sigkill_leaves_no_orphan(tiny, tmp_path):
    process = start(grpo_arguments(tiny, tmp_path, *LONG))
    wait_for(in_rollout(tmp_path), 60, process)
    ours = children(process.pid)
    process.kill()
    assert gone_within(ours, 5)
    process.communicate()


@pytest.mark.parametrize("victim, error", [("instep.engines.embedded", "EngineError"), ("worker_main", "WorkerError")])
def test_a_killed_process_is_named_in_seconds(tiny, tmp_path, victim, error):
    process = start(grpo_arguments(tiny, tmp_path, *LONG))
    wait_for(in_rollout(tmp_path), 60, process)
    target = next(p for p in children(process.pid) if victim in " ".join(p.cmdline()))
    os.kill(target.pid, signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert process.returncode == 1
    assert error in stderr and "SIGKILL" in stderr and "remedy" in stderr, stderr


def test_a_full_disk_at_save_keeps_the_last_good_checkpoint(tiny, tmp_path):
    """No file may grow beyond 500 kB, which the trainer's checkpoint does: the write fails as on a full disk."""
    ckpt = tmp_path / "ckpt"
    first = run(grpo_arguments(tiny, tmp_path / "a", "--num-rollout", "1", "--save", str(ckpt)))
    assert first.returncode == 0, first.stderr[-3000:]
    more = ["--num-rollout", "2", "--save", str(ckpt), "--load", str(ckpt)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))  # noqa: E731
    process = start(grpo_arguments(tiny, tmp_path / "b", *more), preexec_fn=limit)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1 and "CheckpointError" in stderr and "untouched" in stderr, stderr[-3000:]
    assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert sorted(p.name for p in ckpt.glob("[!.]*")) == ["iter_0000000", "latest_checkpointed_iteration.txt"]
    last = run(grpo_arguments(tiny, tmp_path / "c", *more))
    assert last.returncode == 0, last.stderr[-3000:]
    assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "1"


def hook(tmp_path, body):
    (tmp_path / "my_hooks.py").write_text(body)
    return tmp_path


@pytest.mark.parametrize(
    "body, words",
    [
        ("async def reward(args, sample, **kw):\n    raise ZeroDivisionError('oh')\n", ["ZeroDivisionError", "oh"]),
        ("async def reward(args, sample, **kw):\n    return float('nan')\n", ["nan"]),
        ("import time\nasync def reward(args, sample, **kw):\n    time.sleep(1000)\n", ["2 s"]),
    ],
)
def test_a_bad_reward_function_is_named(tiny, tmp_path, monkeypatch, body, words):
    monkeypatch.setenv("PYTHONPATH", str(hook(tmp_path, body)))
    from tests.e2e import commands

    monkeypatch.setitem(commands.ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    more = ["--custom-rm-path", "my_hooks.reward", "--reward-timeout", "2"]
    done = run(grpo_arguments(tiny, tmp_path / "run", *more), timeout=90)
    assert done.returncode == 1
    assert "RewardError" in done.stderr and "my_hooks.reward" in done.stderr, done.stderr[-2000:]
    assert all(word in done.stderr for word in words), done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error_at_once(tiny, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(grpo_arguments(tiny, tmp_path, "--engine-port", port), timeout=60)
    assert done.returncode == 2 and f"port {port} is taken" in done.stderr


def test_a_run_dir_shows_what_happened(tiny, tmp_path):
    done = run(grpo_arguments(tiny, tmp_path, "--num-rollout", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "logs" / "engine-0.log").exists() and (tmp_path / "logs" / "actor-rank0.log").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ledger"]["num_consumed"] == 4

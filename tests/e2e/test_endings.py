"""What a run leaves behind when all went well; how it ends otherwise is the matter of `tests/faults/`."""

import json
import signal
import time

import pytest

from tests.bounds import allowed
from tests.e2e.commands import grpo_arguments, run, sft_arguments, start

LONG = ["--num-rollout", "1000", "--rollout-max-response-len", "100"]


def wait_for(condition, seconds, process):
    began = time.monotonic()
    while time.monotonic() - began < allowed(seconds):
        if condition():
            return
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    raise AssertionError("did not happen in time")


def in_rollout(run_dir):
    """A condition: at least one training step is done, so the engine is at work again."""
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and "train/loss" in path.read_text()


@pytest.mark.slow
def test_a_run_dir_shows_what_happened(tiny, tmp_path):
    done = run(grpo_arguments(tiny, tmp_path, "--num-rollout", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "logs" / "engine-0.log").exists() and (tmp_path / "logs" / "actor-rank0.log").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ledger"]["num_consumed"] == 4


@pytest.mark.slow
def test_a_second_interrupt_does_not_lose_the_way_to_go_on(tiny, tmp_path):
    """It comes while the processes end, before the report is written: tried again where this machine was too slow."""
    for number in range(3):
        folder = tmp_path / str(number)
        process = start([*sft_arguments(tiny, folder, "--num-rollout", "100000"), "--save-interval", "1"])
        try:
            saved = folder / "ckpt" / "latest_checkpointed_iteration.txt"
            wait_for(saved.exists, 120, process)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("interrupted, "))
            before = not (folder / "summary.json").exists()  # nothing is waited for before that line
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=240)[1]
        finally:
            process.kill()
        iteration = folder / "ckpt" / f"iter_{int(saved.read_text()):07d}"
        assert f"the last checkpoint is {iteration}: the same command, with --load {folder / 'ckpt'}," in line
        assert "Traceback" not in rest and rest.count("interrupted, ") == 0
        if before:
            break
    assert before and process.returncode == 130

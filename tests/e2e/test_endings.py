"""What a run leaves behind when all went well; how it ends otherwise is the matter of `tests/faults/`."""

import json
import time

from tests.e2e.commands import grpo_arguments, run

LONG = ["--num-rollout", "1000", "--rollout-max-response-len", "100"]


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


def test_a_run_dir_shows_what_happened(tiny, tmp_path):
    done = run(grpo_arguments(tiny, tmp_path, "--num-rollout", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "logs" / "engine-0.log").exists() and (tmp_path / "logs" / "actor-rank0.log").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ledger"]["num_consumed"] == 4

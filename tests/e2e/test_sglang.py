"""Runs on real SGLang behind sglang-router, on the CPU."""

import json

import pytest

from tests.e2e.commands import on_sglang, run
from tests.e2e.test_engines import NUM_ROLLOUT, kill_one, steps_of, two_engines

pytestmark = [pytest.mark.sglang, pytest.mark.sglang_router]


def on_two(small, run_dir, *more):
    return two_engines(small, run_dir, "sglang", *on_sglang(2)[2:], *more)


def test_a_run_on_two_engines(small, tmp_path):
    """Log-probs of every trained token to 1e-5 in float32, its version, and no group lost."""
    dump = ["--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt")]
    done = run([*on_two(small, tmp_path), *dump], 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5
    assert [row["sync/version"] for row in steps] == list(range(2, NUM_ROLLOUT + 2))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["disk", "nccl", "ipc", "restart", "single-copy"])
def test_each_way_of_weights(small, tmp_path, way):
    done = run([*on_two(small, tmp_path), "--weight-sync", way], 400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5


@pytest.mark.slow
def test_an_adapter(small, tmp_path):
    flags = ["--lora-rank", "4", "--weight-sync", "lora", "--lr", "1e-2"]
    done = run([*on_two(small, tmp_path), *flags], 400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5


@pytest.mark.slow
def test_an_engine_of_two_ranks(small, tmp_path):
    flags = ["--rollout-num-gpus-per-engine", "2"]
    done = run([*on_two(small, tmp_path), *flags], 400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert max(row["train/log_prob_gap_max"] for row in steps_of(tmp_path)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", [pytest.param({}, id="server"), pytest.param({"KILL_CORE": "1"}, id="one of its processes")]
)
def test_a_killed_engine_costs_no_sample(small, tmp_path, env):
    steps = kill_one(tmp_path, on_two(small, tmp_path), **env)
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"

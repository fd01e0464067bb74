"""Prefill and decode on vLLM engines of their own: NIXL hands the KV cache of each prompt from one to the other."""

import importlib.util
import json

import pytest
import torch

from tests.e2e.commands import on_vllm, run
from tests.e2e.test_engines import kill_one, nothing_lost, two_engines
from tests.e2e.test_pause_modes import numbers_of_versions, train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl: not installed (make install-vllm)"),
]


def apart(num_engines, num_prefill):
    if torch.cuda.is_available() and torch.cuda.device_count() < num_engines:
        pytest.skip(f"{num_engines} engines need a GPU each")
    return [*on_vllm(num_engines), "--prefill-num-servers", str(num_prefill)]


@pytest.mark.slow
def test_every_response_begins_with_the_cache_of_a_prefill_engine(small, tmp_path):
    """Its tokens have the trainer's log-probs, before and after updates.

    A transfer may fail on a busy machine; its request is then asked for again, so that each sample still has one.
    """
    hook = ["--custom-rm-path", "tests.e2e.topology_hooks.reward_that_looks_at_transfers", "--no-hook-trial"]
    done = run([*two_engines(small, tmp_path, "vllm", *apart(2, 1)), *hook], 400)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = nothing_lost(tmp_path)
    assert max(row["train/log_prob_gap_max"] for row in steps) < 1e-5
    seen = [json.loads(line) for line in (tmp_path / "transfers.jsonl").read_text().splitlines()]
    assert len(seen) == 16 * len(steps)
    assert max(s["transfers"] for s in seen) >= 16 * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 2])
def test_a_killed_one_costs_no_sample(small, tmp_path, num_prefill):
    """Engine 1 of 3 is one of two that decode, or one of two that prefill."""
    steps = kill_one(tmp_path, two_engines(small, tmp_path, "vllm", *apart(3, num_prefill)))
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.slow
def test_responses_across_weight_syncs(long):
    """Of an aborted response the rest is of the next version, with keys and values that are computed again."""
    assert len(numbers_of_versions(long, "abort", train(long, "abort", *apart(2, 1)))) > 1

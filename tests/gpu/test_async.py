"""Trainer and vLLM at work at once on the same GPUs: each token is of the version that it claims, and within the bound.

Each rollout has the prompts of the one before, which engines find in their caches. Two GPUs have an engine each.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.e2e import conftest
from tests.e2e.commands import on_vllm
from tests.e2e.test_async_freshness import NEAR, NUM_ROLLOUT, gap_with_prefix_hits

long = conftest.long  # the fixture
CPU = bool(os.environ.get("INSTEP_TEST_ON_CPU"))  # tries it without a GPU, on two engines
ON_GPU = torch.cuda.is_available()
ENGINES = min(2, torch.cuda.device_count()) if ON_GPU else 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU and not CPU, reason="needs a GPU")]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_every_token_is_of_the_version_it_claims_while_both_share_a_gpu(long, mode):
    gap, hits = gap_with_prefix_hits(long, mode, *on_vllm(ENGINES))
    print(f"{mode}: the largest gap is {gap:.1e} nats; tokens found in the {ENGINES} caches: {hits}")
    assert gap < NEAR and len(hits) == ENGINES and min(hits) > 500
    rows = [json.loads(line) for line in (long / f"fresh-{mode}" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == NUM_ROLLOUT and max(row["async/staleness_max"] for row in steps) <= 2
    assert not ON_GPU or all(row["memory/train/trainer_bytes"] > 0 for row in steps)  # nobody has left

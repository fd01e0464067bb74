"""Trainer and vLLM at work at once on one GPU: every token is of the version that it claims, and within the bound."""

from __future__ import annotations

import json

import pytest
import torch

from instep.engines.vllm import VllmKind
from tests.e2e import conftest
from tests.e2e.commands import on_vllm
from tests.e2e.test_async_freshness import NEAR, NUM_ROLLOUT, gap_of_every_token

long = conftest.long  # the fixture
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_every_token_is_of_the_version_it_claims_while_both_share_a_gpu(long, mode):
    if mode == "keep" and not VllmKind().capabilities.version_spans:
        pytest.skip("this vLLM does not say which weights made a token")
    assert gap_of_every_token(long, mode, *on_vllm(1)) < NEAR
    rows = [json.loads(line) for line in (long / f"fresh-{mode}" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == NUM_ROLLOUT and max(row["async/staleness_max"] for row in steps) <= 2
    assert all(row["memory/train/trainer_bytes"] > 0 for row in steps)  # nobody has left

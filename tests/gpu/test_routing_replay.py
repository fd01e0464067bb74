"""Router replay on a GPU: the experts that real vLLM notes are those that its log-probs were computed with."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.commands import on_vllm
from tests.e2e.test_routing_replay import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("answers", [[], ["--no-fast-log-probs"]], ids=["arrays", "json"])
def test_the_gap_is_smaller_with_vllms_experts(answers, tmp_path):
    (largest, mean), (own_largest, own_mean) = compare(tmp_path, *on_vllm(), *answers)
    assert mean < 0.8 * own_mean and largest < 0.5 * own_largest

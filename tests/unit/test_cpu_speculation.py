"""What instep puts in the place of vLLM's kernel for speculation on a CPU."""

from __future__ import annotations

import torch

from instep_engine.vllm.cpu_speculation import expand


def test_each_draft_gets_the_temperature_of_its_request():
    output = torch.full((4,), 9.0)
    expand(output, torch.tensor([0.0, 0.5, 0.7]), torch.tensor([1, 1, 4], dtype=torch.int32), 0.0, 1.0)
    assert output.tolist() == torch.tensor([1.0, 0.7, 0.7, 0.7]).tolist()

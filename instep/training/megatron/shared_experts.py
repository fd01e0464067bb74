"""Megatron's shared experts, whose gate may have an adapter.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor


class Gate(MegatronModule):
    """Computes the logits of the gate. Its weight stays that of the shared experts, under Megatron's name."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)


class SharedExperts(SharedExpertMLP):
    """The experts that every token uses, with the weights of Megatron's class."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gate = Gate(self.config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute `[num_tokens, 1, hidden]` -> the same."""
        out: Tensor = MLP.forward(self, hidden)[0]
        return out * self.gate(hidden, self.gate_weight).sigmoid() if self.use_shared_expert_gate else out

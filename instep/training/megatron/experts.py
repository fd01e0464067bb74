"""Megatron's experts with grouped matrix products (--moe-grouped-gemm), without Transformer Engine.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from instep.training.grouped import grouped_linear


@jit_fuser
def _activated(x: Tensor, probs: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)


class GroupedExperts(SequentialMLP):
    """The experts of a rank with the weights of Megatron's `SequentialMLP`, under the same names, computed together."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`[num_tokens, hidden]`, one expert's tokens after another's, and what each counts -> `[num_tokens, hidden]`.

        A product with no rows at all is left to the experts themselves.
        """
        if not len(hidden):
            alone: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
            return alone
        ends = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        up, down = ([getattr(e, name).weight for e in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        wide = grouped_linear(hidden, ends, up)
        if self.config.recompute_granularity != "selective" or "moe_act" not in self.config.recompute_modules:
            return grouped_linear(_activated(wide, probs), ends, down), None
        again = CheckpointWithoutOutput(fp8=None)  # False counts as FP8 there
        out = grouped_linear(again.checkpoint(_activated, wide, probs), ends, down)
        again.discard_output_and_register_recompute(out)
        return out, None

"""The RMS norms of Megatron's models (Zhang and Sennrich 2019, arXiv 1910.07467).

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class HeadRMSNorm(torch.nn.RMSNorm):
    """The norm of queries and keys; Megatron sums its gradient by name (`q_layernorm`, `k_layernorm`).

    Some families add 1 to its weight, in float32, as transformers does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.centred_at_zero = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.centred_at_zero:
            return super().forward(x)
        return _norm_plus_one(x, self.weight, self.eps)


class RMSNorm(HeadRMSNorm):
    """The norm of the residual stream. Megatron's torch norm refuses sequence parallelism. The attribute of the weight
    makes `finalize_model_grads` sum its gradient over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(config, hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


@jit_fuser
def _norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).type_as(x)

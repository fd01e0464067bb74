"""Megatron's optimizer with the moments of its AdamW in host memory (--optimizer-cpu-offload).

Megatron's own way (HybridDeviceOptimizer) steps copies of the masters on the CPU; what is loaded into the masters, from
a checkpoint or Hugging Face weights, does not reach these copies. Here the AdamW inside is the one of the hf backend,
which brings moments to the GPU a piece at a time; masters stay on the GPU.
"""

from __future__ import annotations

from typing import Any

from instep.training.hf.optimizer import PiecewiseAdamW


def keep_moments_in_pieces(optimizer: Any, *, offload: bool) -> None:
    """Replace the AdamW inside each of Megatron's optimizers, before its first step; `offload`: moments on the host."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):  # it has nothing to train
            continue
        groups = [dict(group) for group in part.optimizer.param_groups]
        part.optimizer = PiecewiseAdamW(groups, {}, eight_bits=False, offload=offload)

"""Megatron's optimizer with 8-bit AdamW moments (--optimizer adamw_8bit), or in host memory (--optimizer-cpu-offload).

Both flags also work together. Megatron's own offload (HybridDeviceOptimizer) steps copies of the masters on the CPU.
Values loaded into the masters, from a checkpoint or Hugging Face weights, do not reach these copies. Here the inner
AdamW is that of the hf backend. It unpacks moments, or copies them to the GPU, a piece at a time; masters stay on the
GPU. With the distributed optimizer, each rank has the moments of its slices, and blocks start where the slice does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from instep.arguments.settings import Settings
from instep.training.hf.optimizer import EIGHT_BITS, PiecewiseAdamW


def keep_moments_as_asked(optimizer: Any, args: Settings, *, cuda: bool) -> None:
    """Replace the AdamW inside each of Megatron's optimizers, before its first step, if the arguments require it."""
    eight_bits, offload = args.optimizer == EIGHT_BITS, cuda and args.optimizer_cpu_offload
    if eight_bits or offload:
        keep_moments_in_pieces(optimizer, eight_bits=eight_bits, offload=offload, compiles=not args.no_torch_compile)


def keep_moments_in_pieces(optimizer: Any, *, eight_bits: bool, offload: bool, compiles: bool = True) -> None:
    """Replace the AdamW inside each of Megatron's optimizers; see `PiecewiseAdamW` for the arguments."""
    from instep.training.megatron.checkpoint import real_optimizers

    for part in real_optimizers(optimizer):
        groups = [dict(group) for group in part.optimizer.param_groups]
        for p in (p for group in groups for p in group["params"]):
            if not p.is_leaf:  # a slice of a float32 parameter; Megatron itself sets its gradient
                p.retain_grad()  # otherwise torch's optimizers refuse it
        part.optimizer = PiecewiseAdamW(groups, {}, eight_bits=eight_bits, offload=offload, compiles=compiles)
    if eight_bits and not offload:
        _join(optimizer)


def _join(optimizer: Any) -> None:
    """Step copies of parameters in the order of the gradients, which Megatron has in one memory."""
    from instep.training.megatron.checkpoint import masters

    found: dict[PiecewiseAdamW, list[tuple[Tensor, Tensor]]] = {}
    for param, master in masters(optimizer).items():
        if param.dtype is not torch.float32:  # otherwise the master is the parameter, whose place is Megatron's
            gradient = cast(Any, param).main_grad.view(-1)[master.start : master.stop]
            found.setdefault(master.optimizer, []).append((master.tensor, gradient))
    for inner, gradients in found.items():
        inner.join(sorted(gradients, key=lambda pair: pair[1].data_ptr()))

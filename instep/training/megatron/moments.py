"""Megatron's optimizer with 8-bit AdamW moments (--optimizer adamw_8bit), or in host memory (--optimizer-cpu-offload).

Both flags also work together. Megatron's own offload (HybridDeviceOptimizer) steps copies of the masters on the CPU.
Values loaded into the masters, from a checkpoint or Hugging Face weights, do not reach these copies. Here the inner
AdamW is that of the hf backend. It unpacks moments, or copies them to the GPU, a piece at a time; masters stay on the
GPU. With the distributed optimizer, each rank has the moments of its slices, and blocks start where the slice does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.training.hf.optimizer import EIGHT_BITS, PiecewiseAdamW

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def keep_moments_as_asked(optimizer: Any, args: Settings, *, cuda: bool) -> None:
    """Replace the AdamW inside each of Megatron's optimizers, before its first step, if the arguments require it."""
    eight_bits, offload = args.optimizer == EIGHT_BITS, cuda and args.optimizer_cpu_offload
    if eight_bits or offload:
        keep_moments_in_pieces(optimizer, eight_bits=eight_bits, offload=offload, compiles=not args.no_torch_compile)


def keep_moments_in_pieces(optimizer: Any, *, eight_bits: bool, offload: bool, compiles: bool = True) -> None:
    """Replace the AdamW inside each of Megatron's optimizers; see `PiecewiseAdamW` for the arguments."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):  # it has nothing to train
            continue
        groups = [dict(group) for group in part.optimizer.param_groups]
        for p in (p for group in groups for p in group["params"]):
            if not p.is_leaf:  # a slice of a float32 parameter; Megatron itself sets its gradient
                p.retain_grad()  # otherwise torch's optimizers refuse it
        part.optimizer = PiecewiseAdamW(groups, {}, eight_bits=eight_bits, offload=offload, compiles=compiles)

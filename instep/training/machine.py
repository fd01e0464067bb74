"""Errors of torch that are the machine's, whatever model runs on it."""

from __future__ import annotations

import torch
import torch.distributed as dist

_KINDS = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
# Of the CPU's allocator and of gloo, whose errors are plain RuntimeErrors, and of older builds for GPUs.
_SIGNS = ("DefaultCPUAllocator", "gloo/", "CUDA error", "NCCL error")


def is_of_the_machine(error: Exception) -> bool:
    """Whether a device, its memory or the connection to another rank has failed."""
    return isinstance(error, _KINDS) or any(sign in str(error) for sign in _SIGNS)

"""The memory of a rank's device, and which errors of torch come from the machine, not the model."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

_KINDS = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
# Of the CPU's allocator and of gloo, whose errors are plain RuntimeErrors, and of older builds for GPUs.
_SIGNS = ("DefaultCPUAllocator", "gloo/", "CUDA error", "NCCL error")


def is_of_the_machine(error: Exception) -> bool:
    """Whether a device, its memory or the connection to another rank has failed."""
    return isinstance(error, _KINDS) or any(sign in str(error) for sign in _SIGNS)


def memory_of(device: torch.device) -> float:
    """The memory of a GPU in bytes; infinite for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf

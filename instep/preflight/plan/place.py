"""The memory of a GPU or host, and what a process needs of it for itself."""

from __future__ import annotations

from instep.arguments.settings import Settings
from instep.system.limits import host_memory

GB = 1e9
CONTEXT = 1.5 * GB  # GPU memory of a process: CUDA, NCCL, kernels, workspaces (measured on an H100)
PROCESS = 3 * GB  # host memory of a process with CUDA and its libraries
CPU_PROCESS = 0.7 * GB  # the same of one that computes on a CPU, and of the controller


def memory_of(args: Settings) -> float:
    """Return the bytes of a GPU; on a CPU, those of this host."""
    return host_memory() if args.device == "cpu" else args.gpu_memory_gb * 2**30


def of_process(args: Settings) -> tuple[float, float]:
    """Return the bytes that a process needs for itself: on its GPU, and on the host."""
    return (0.0, CPU_PROCESS) if args.device == "cpu" else (CONTEXT, PROCESS)

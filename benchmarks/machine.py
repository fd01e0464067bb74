"""The machine of a benchmark."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from instep.system.gpus import visible_gpus


def cpu_name() -> str:
    """Return the CPU's name from /proc/cpuinfo, with its numbers, as the name in a virtual machine says little."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found['cpu family']} model {found['model']} stepping {found['stepping']}"


def cores() -> str:
    """Return the CPU's name, and how many of its cores this process may use."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def only_visible() -> list[str]:
    """Words for nvidia-smi, by which it tells of those GPUs alone that CUDA_VISIBLE_DEVICES shows."""
    return ["-i", ",".join(gpu.index for gpu in visible_gpus())] if visible_gpus() else []

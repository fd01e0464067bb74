"""The GPUs of this host, as nvidia-smi reports them."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass

_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA, also on boards and in WSL, and AMD


def no_driver() -> bool:
    """Return whether this host certainly has no GPU: /dev has no file of a driver. This needs no torch."""
    return not any(map(os.path.exists, _DRIVERS))


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    mig_mode: str
    memory_mib: str
    name: str


@functools.cache
def gpus_here() -> tuple[Gpu, ...]:
    """Return all GPUs of this host; an empty tuple if nvidia-smi is absent, fails or takes more than 30 s.

    It runs once per process: without the driver's persistence mode an answer takes seconds.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,mig.mode.current,memory.total,name"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=True
        )
        lines = [line.split(",", maxsplit=4) for line in done.stdout.splitlines() if line.strip()]
        return tuple(Gpu(*(cell.strip() for cell in line)) for line in lines)
    except (OSError, subprocess.SubprocessError, TypeError):  # TypeError: lines of another format
        return ()


def memory_of_gpus() -> float | None:
    """Return the memory in GiB of the smallest GPU of this host that CUDA_VISIBLE_DEVICES shows.

    Return None if nvidia-smi does not report it, and for parts of a GPU (MIG).
    """
    try:
        return min(float(gpu.memory_mib) for gpu in visible_gpus()) / 1024
    except ValueError:  # no GPU, or "[N/A]"
        return None


def visible_gpus() -> list[Gpu]:
    """Return the whole GPUs that CUDA_VISIBLE_DEVICES shows (by index or the beginning of a UUID), in its order; an
    empty list if that is not clear, or if one of them is divided (MIG)."""
    names, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), list(gpus_here())
    if names is not None:
        asked = [name.strip() for name in names.split(",")]
        gpus = [g for name in asked for g in gpus if g.index == name or (name and g.uuid.startswith(name))]
        if len(gpus) != len(asked):
            return []
    return [] if any(gpu.mig_mode == "Enabled" for gpu in gpus) else gpus

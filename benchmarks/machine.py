"""What a CPU benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """As /proc/cpuinfo has it, with the model's number, as a virtual machine's name says little."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found['cpu family']} model {found['model']} stepping {found['stepping']}"


def cores() -> str:
    """The CPU, and how many of its cores this process may use."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"

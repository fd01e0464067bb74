"""What this host or container has."""

from __future__ import annotations

from pathlib import Path

import psutil


def cgroup(name: str) -> list[str]:
    """Return the words of a limit of this container (cgroup v2); empty if there is no limit."""
    try:
        words = (Path("/sys/fs/cgroup") / name).read_text().split()
    except OSError:
        return []
    return [] if words[0] == "max" else words


def host_memory() -> float:
    """Return the bytes of memory of this host, or of this container."""
    return float(min(psutil.virtual_memory().total, *map(int, cgroup("memory.max")), 2**60))

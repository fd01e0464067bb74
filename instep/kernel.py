"""What the kernel tells of processes, in Linux's /proc: which belong together, and which stand stopped."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path

STOPPED_SECONDS = 3.0  # a process that stands stopped for so long is a fault; a shorter stop is only slow
LOOK_SECONDS = 0.5  # between two looks at the states of a family
FAMILY_SECONDS = 2.0  # between two looks at who belongs to it, which cost more


def state_and_cpu_ticks(pid: int) -> tuple[str, int]:
    """The kernel's letter for the state of a process ("T": stopped by a signal), and the CPU time it has used."""
    if sys.platform != "linux":
        return "?", 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # see proc(5)
    except OSError:  # it has ended, or is hidden
        return "X", 0
    return fields[0], int(fields[11]) + int(fields[12])


def name_of(pid: int) -> str:
    """The kernel's name of a process, at most 15 characters; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def set_name(name: str) -> None:
    """Name this process for `name_of`, `ps` and `top`."""
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only: it is a comfort
        Path("/proc/self/comm").write_text(name)


def family(pid: int) -> list[int]:
    """`pid` and its descendants; nothing for a process that has ended, or where this is not Linux."""
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # this thread has ended
            found += [p for child in tasks.read_text().split() for p in family(int(child))]
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process handles the signal `number`, which may end it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)  # see proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class Standstill:
    """Finds the processes of a family that stand stopped (SIGSTOP, SIGTSTP).

    Durations are measured from look to look, because the kernel does not tell them.

    Args:
        root: the pid of the eldest, which belongs to the family.
    """

    def __init__(self, root: int):
        self._root = root
        self._family: list[int] = [root]
        self._counted = self._looked = -FAMILY_SECONDS  # when last
        self._seen: dict[int, tuple[int, float]] = {}  # pid -> (CPU ticks, time) when it was first seen stopped
        self._stopped: list[int] = []

    def look(self) -> list[int]:
        """Return the pids that have stood stopped for `STOPPED_SECONDS`, the eldest first. Call it repeatedly."""
        now = time.monotonic()
        if now - self._looked < min(LOOK_SECONDS, STOPPED_SECONDS / 4):
            return self._stopped
        self._looked = now
        if now - self._counted >= FAMILY_SECONDS:
            self._counted, self._family = now, family(self._root) or [self._root]
        seen: dict[int, tuple[int, float]] = {}
        for pid in self._family:
            state, ticks = state_and_cpu_ticks(pid)
            if state == "T":
                before = self._seen.get(pid)  # one that has used CPU time since has run between two looks
                seen[pid] = before if before is not None and before[0] == ticks else (ticks, now)
        self._seen = seen
        self._stopped = [pid for pid, (_, since) in seen.items() if now - since >= STOPPED_SECONDS]
        return self._stopped

"""What the kernel tells of processes: which belong together, and which stand stopped."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

STOPPED_SECONDS = 3.0  # a process that stands stopped for so long is a fault; a shorter stop is only slow
LOOK_SECONDS = 0.5  # between two looks at the states of a family
DESCRIPTORS = 65536  # open files of a process, where its hard limit allows so many; the default is often 1024
FAMILY_SECONDS = 2.0  # between two looks at who belongs to it, which cost more


def state_of(pid: int, what: str = "status") -> str:
    """psutil's word for the state of a process ("stopped": by a signal); empty for one that has ended."""
    import psutil  # not for `--help`

    with contextlib.suppress(psutil.Error):  # also one that is hidden
        return str(getattr(psutil.Process(pid), what)())
    return ""


def name_of(pid: int) -> str:
    """The name of a process; empty for one that has ended."""
    return state_of(pid, "name")


def die_with_parent() -> None:
    """End with the thread that has started this process (on Linux)."""
    parent = os.getppid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_descriptors() -> None:
    """Let this process and its children have many open files, so that connections of others do not use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def family(pid: int) -> list[int]:
    """`pid` and its descendants, parents first; nothing for a process that has ended."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # also where other users' processes are hidden
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def catches(pid: int, number: int) -> bool:
    """Whether a process handles the signal `number`, which may end it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)  # see proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class Standstill:
    """The processes under this one that stand stopped (SIGSTOP, SIGTSTP), looked at once for all threads that ask.

    The kernel does not tell durations, so they are summed up from look to look. The time between two looks counts as at
    most a third of `STOPPED_SECONDS`: who looks late may have been stopped itself, with all processes of the run
    (SLURM suspends a job so), and sees them stopped for one more moment when it goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = self._scanned = -math.inf
        self._family: list[int] = []  # this process and its descendants
        self._seconds: dict[int, float] = {}  # that those of them have stood stopped which are

    def look(self, pid: int) -> list[int]:
        """`pid`, one of this process or its descendants, and those below it that have stood stopped for
        `STOPPED_SECONDS`, parents first. Call it repeatedly."""
        with self._lock:
            now = time.monotonic()
            if now - self._scanned >= FAMILY_SECONDS or pid not in self._family:
                self._scanned, self._family = now, family(os.getpid())
            passed = now - self._looked
            if passed >= min(LOOK_SECONDS, STOPPED_SECONDS / 4):
                self._looked, passed = now, min(passed, STOPPED_SECONDS / 3)
                still = [one for one in self._family[1:] if state_of(one) == "stopped"]
                self._seconds = {one: self._seconds.get(one, -passed) + passed for one in still}
            late = {one for one, seconds in self._seconds.items() if seconds >= STOPPED_SECONDS * (1 - 1e-9)}
        return [one for one in family(pid) if one in late] if late else []


stopped = Standstill().look

"""What the kernel tells of processes, in Linux's /proc: which belong together, and which stand stopped."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STOPPED_SECONDS = 3.0  # a process that stands stopped for so long is a fault; a shorter stop is only slow
LOOK_SECONDS = 0.5  # between two looks at the states of a family
DESCRIPTORS = 65536  # open files of a process, where its hard limit allows so many; the default is often 1024
FAMILY_SECONDS = 2.0  # between two looks at who belongs to it, which cost more


class _Stat(NamedTuple):
    state: str
    parent: int
    cpu_ticks: int


def _stat(pid: int) -> _Stat:
    if sys.platform != "linux":
        return _Stat("?", 0, 0)
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # see proc(5)
    except OSError:  # it has ended, or is hidden
        return _Stat("X", 0, 0)
    return _Stat(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]))


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process ("T": stopped by a signal), "X" for one that has ended."""
    return _stat(pid).state


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
    """`pid` and its descendants, parents first; nothing for a process that has ended, or where this is not Linux."""
    return _descendants(pid, _children()) if Path(f"/proc/{pid}").exists() else []


def _children() -> dict[int, list[int]]:
    """The children of every process of this host, from one look at each."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdigit():
            children.setdefault(_stat(int(name)).parent, []).append(int(name))
    return children


def _descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    found, left = [pid], dict(children)
    for parent in found:  # which grows meanwhile
        found += left.pop(parent, [])
    return found


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
        self._children: dict[int, list[int]] = {}
        self._known: set[int] = set()  # this process's descendants
        self._seen: dict[int, tuple[int, float]] = {}  # pid -> (CPU ticks, seconds stopped) of those that are stopped

    def look(self, pid: int) -> list[int]:
        """`pid`, one of this process or its descendants, and those below it that have stood stopped for
        `STOPPED_SECONDS`, parents first. Call it repeatedly."""
        with self._lock:
            now = time.monotonic()
            if now - self._scanned >= FAMILY_SECONDS or pid not in self._known:
                self._scanned, self._children = now, _children()
                self._known = {os.getpid(), *_descendants(os.getpid(), self._children)}
            passed = now - self._looked
            if passed >= min(LOOK_SECONDS, STOPPED_SECONDS / 4):
                self._looked = now
                self._seen = dict(self._look(min(passed, STOPPED_SECONDS / 3)))
            late = {one for one, (_, seconds) in self._seen.items() if seconds >= STOPPED_SECONDS * (1 - 1e-9)}
            return [one for one in _descendants(pid, self._children) if one in late] if late else []

    def _look(self, passed: float) -> Iterator[tuple[int, tuple[int, float]]]:
        for pid in self._known - {os.getpid()}:
            stat = _stat(pid)
            if stat.state == "T":
                ticks, seconds = self._seen.get(pid, (-1, 0.0))  # one that has used CPU time has run between two looks
                yield pid, (stat.cpu_ticks, seconds + passed if ticks == stat.cpu_ticks else 0.0)


stopped = Standstill().look

"""Facts from the kernel about processes: which belong together, and which are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
from pathlib import Path

STOPPED_SECONDS = 3.0  # a process that stays stopped for this long is a fault; a shorter stop is only slow
DESCRIPTORS = 65536  # open files of a process, if its hard limit allows it; the default is often 1024


def state_of(pid: int) -> str:
    """Return psutil's word for the state of a process ("stopped": by a signal); empty if it has ended."""
    import psutil  # not for `--help`

    with contextlib.suppress(psutil.Error):  # also a hidden process
        return str(psutil.Process(pid).status())
    return ""


def die_with_parent() -> None:
    """End this process with the thread that started it."""
    parent = os.getppid()
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_descriptors() -> None:
    """Allow this process and its children many open files, so that connections of others do not use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def family(pid: int) -> list[int]:
    """Return `pid` and its descendants, parents first; an empty list if the process has ended."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # also if other users' processes are hidden
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles the signal `number`; otherwise the signal may end it."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)  # see proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)

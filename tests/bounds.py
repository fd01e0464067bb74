"""Bounds of seconds that hold on a busy machine, too.

What instep promises is in seconds (a hang is named within ten). A fixed bound of minutes would not see a broken
promise, and a fixed bound of seconds fails beside other work. So these grow with the load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MOST = 6.0


def allowed(seconds: float) -> float:
    """A bound of a machine that has a core for each process; up to `MOST` times it where other tests run beside.

    The load is that of the last minute or of this moment, whichever is more.
    """
    with open("/proc/loadavg") as file:
        last_minute, _, _, now, _ = file.read().split()
    load = max(float(last_minute), float(now.partition("/")[0]))
    return seconds * min(MOST, max(1.0, load / len(os.sched_getaffinity(0))))


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for what must come, however busy the machine is."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < allowed(seconds), f"it did not come within {seconds:.0f} s"
        time.sleep(0.02)

"""Bounds of seconds that hold on a busy machine, too."""

from __future__ import annotations

import os

MOST = 6.0


def allowed(seconds: float) -> float:
    """A bound of a machine that has a core for each process; up to `MOST` times it where other tests run beside."""
    return seconds * min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))

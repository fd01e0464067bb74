"""Bounds of seconds that hold on a busy machine, too."""

from __future__ import annotations

import os


def allowed(seconds: float) -> float:
    """A bound of a machine that has a core for each process; longer by the load where other tests run beside."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

"""Changes of a whole process that several of its runs want."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable


def shared_by_runs(change: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], None]]:
    """Return `change`, a change of this process that returns how to undo it, for runs that overlap.

    The first run makes the change, and the last one undoes it.
    """
    lock = threading.RLock()  # a garbage collection may end a forgotten run here
    undo: list[Callable[[], object]] = []  # once for each run

    def leave() -> None:
        with lock:
            last = undo.pop()
            if not undo:
                last()

    @functools.wraps(change)
    def begin() -> Callable[[], None]:
        with lock:
            undo.append(undo[0] if undo else change())
        return leave

    return begin

"""Locks on files (flock) that end with their process, even if a hook forked a child that still lives."""

from __future__ import annotations

import fcntl
import os

_held: set[int] = set()  # descriptors


def lock(fd: int) -> None:
    """Lock the file of `fd`; `close` releases both. Raises: BlockingIOError, another process has the lock."""
    _held.add(fd)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def close(fd: int) -> None:
    """Close the `fd` of a lock; do nothing in a forked child, which has no lock."""
    if fd in _held:
        _held.remove(fd)
        os.close(fd)


def _let_go() -> None:
    # A lock belongs to the open file, which a child shares: the child would keep the lock until it ends.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)

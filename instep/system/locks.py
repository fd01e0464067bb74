"""Locks on files (flock) that end with their process, also where a hook has forked a child that lives on."""

from __future__ import annotations

import fcntl
import os

_held: set[int] = set()  # descriptors


def lock(fd: int) -> None:
    """Take the lock of the file of `fd`; `close` gives both up. Raises: BlockingIOError, another process has it."""
    _held.add(fd)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def close(fd: int) -> None:
    """Close the `fd` of a lock; in a forked child, which has none, nothing happens."""
    if fd in _held:
        _held.remove(fd)
        os.close(fd)


def _let_go() -> None:
    # A lock belongs to the open file, which a child shares: it would hold it until it ends.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)

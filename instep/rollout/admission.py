"""The door of generation requests: a weight sync closes it, so that the weight version of every token is known.

A request to the policy is under way from before it is sent until its answer is read. Where an engine does not report
which weights made a token, `version` tells: it changes only while no request is under way. The door does not hold back
requests to other models, nor those that do not go through `rollout/client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

LOOK_SECONDS = 0.02

_lock = threading.Lock()
_closed = False
_under_way = 0
_guarded = ""  # the beginning of the policy's URLs
version: str | None = None  # of the weights that make tokens now; None: engines report it, or nothing is known


@contextlib.asynccontextmanager
async def admitted(url: str) -> AsyncIterator[None]:
    """Wait until the door is open, then count as under way. The deadline of the sync that closed it bounds the wait."""
    global _under_way
    if not is_guarded(url):
        yield
        return
    while not _enter():
        await asyncio.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1


def _enter() -> bool:
    global _under_way
    with _lock:
        _under_way += not _closed
        return not _closed


def guard(url: str) -> None:
    """Let the door hold back the requests whose URL begins with `url`."""
    global _guarded
    _guarded = url


def is_guarded(url: str) -> bool:
    return url.startswith(_guarded)


def close() -> None:
    global _closed
    with _lock:
        _closed = True


def open_again(new_version: str | None = None) -> None:
    global _closed, version
    with _lock:
        _closed, version = False, new_version


def reset() -> None:
    """Restore the state of a new process, for the next run in this one."""
    guard("")
    open_again()


def num_under_way() -> int:
    with _lock:
        return _under_way

"""The door of generation requests: a weight sync closes it, so that the version of every token is known.

Requests to the policy count from before they are sent until their answer is read. Where an engine does not say which
weights made a token, `version` does: it changes only while no request is under way. Requests that do not come through
`rollout/client.py`, and those to other models, know no door.
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
_guarded = ""  # what the policy's URLs begin with
version: str | None = None  # of the weights that make tokens now; None: engines say it themselves, or nothing is known


@contextlib.asynccontextmanager
async def admitted(url: str) -> AsyncIterator[None]:
    """Wait at a closed door, then be under way. Bounded by who closed it: a sync has a deadline."""
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
    """The policy is asked at `url`."""
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
    """As at the start of the process, for the next run in it."""
    guard("")
    open_again()


def num_under_way() -> int:
    with _lock:
        return _under_way

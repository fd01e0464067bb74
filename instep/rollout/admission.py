"""The gate of generation requests. A weight sync closes it, so that the weight version of every token is known.

A request to the policy is under way from before it is sent until its answer is read. Some engines do not report which
weights made a token. For them `version` says it: it changes only while no request is under way. Two kinds of requests
pass the gate freely: those to other models, and those that do not go through `rollout/client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator

LOOK_SECONDS = 0.02

_lock = threading.Lock()
_closed = False
_under_way = 0
_idle_since: float | None = time.monotonic()  # None: requests are under way
_idle_seconds = 0.0
_guarded = ""  # the beginning of the policy's URLs
num_cached_tokens = math.inf  # the capacity of the KV caches of the policy's engines together; inf: not known
version: str | None = None  # of the weights that make tokens now; None: engines report it, or it is not known


@contextlib.asynccontextmanager
async def admitted(url: str) -> AsyncIterator[None]:
    """Wait until the gate is open, then count as under way. The deadline of the sync that closed it bounds the wait."""
    if not is_guarded(url):
        yield
        return
    while not _enter():
        await asyncio.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        with _lock:
            _count(-1)


def _enter() -> bool:
    with _lock:
        if not _closed:
            _count(1)
        return not _closed


def _count(change: int) -> None:
    global _under_way, _idle_since, _idle_seconds
    now, _under_way = time.monotonic(), _under_way + change
    if _idle_since is not None and _under_way:
        _idle_seconds, _idle_since = _idle_seconds + now - _idle_since, None
    elif not _under_way:
        _idle_since = now


def idle_seconds() -> float:
    """Return for how long no request to the policy was under way, since this process began."""
    with _lock:
        return _idle_seconds + (0.0 if _idle_since is None else time.monotonic() - _idle_since)


def guard(url: str) -> None:
    """Let the gate hold back the requests whose URL begins with `url`."""
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
    """Restore the state of a new process, for the next run in this process."""
    guard("")
    open_again()
    caches_hold(math.inf)


def caches_hold(num_tokens: float) -> None:
    """Let rollouts send at most as many samples at once as fit into `num_tokens` (`room.py`)."""
    global num_cached_tokens
    num_cached_tokens = num_tokens


def num_under_way() -> int:
    with _lock:
        return _under_way

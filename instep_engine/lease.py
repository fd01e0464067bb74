"""The lease of an engine's pause, as its server keeps it.

A trainer that pauses an engine which it has not started takes the lease, and renews it until the engine has resumed:

    {"owner": "process 7 on host1", "seconds": 10.0, "begin": true, "in_place": false}

"begin" takes the lease, otherwise it is renewed. "in_place" says that the trainer is about to write into the memory
that the engine computes with. When nobody has renewed the lease for its seconds, its owner has died or stands still,
and the server hears of it: it may go on, or end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

HELD = "another run has paused this engine"  # trainers look for these three in an answer
EXPIRED = "nobody renewed the lease of this pause, and the engine went on"
UNKNOWN = "nobody holds the lease of this engine: it has resumed, or was started anew"
LONGEST = 3600.0  # seconds


class NoLease(RuntimeError):
    """A trainer may not do what it asks for; `what` says why, and the text is what instep reads as a refusal."""

    def __init__(self, what: str):
        super().__init__(f"WeightMismatch[]: {what}")
        self.what = what


class Lease:
    """The lease of one engine. All calls are made in one event loop.

    Args:
        expired: called when nobody has renewed the lease; its argument says whether the owner may have written into the
            weights in place.
    """

    def __init__(self, expired: Callable[[bool], Awaitable[None]]):
        self._tell = expired
        self._owner = ""  # nobody
        self._in_place = self._expired = False
        self._timer: asyncio.TimerHandle | None = None
        self._told: asyncio.Future[None] | None = None  # a loop keeps no task alive by itself

    def ask(self, given: Any) -> None:
        """Begin or renew the lease, as a request asks for it.

        Raises:
            NoLease: another trainer holds it, it has expired, nobody has begun it, or the request has another form.
        """
        given = given if isinstance(given, dict) else {}
        owner, seconds = given.get("owner"), given.get("seconds")
        if not isinstance(owner, str) or not owner or type(seconds) is not float or not 0 < seconds <= LONGEST:
            raise NoLease(f"a lease has an owner and at most {LONGEST:.0f} seconds, not {owner!r} and {seconds!r}")
        if self._owner not in ("", owner):
            raise NoLease(f"{HELD}: {self._owner}")
        if given.get("begin") is True:
            self._expired = False
        elif not self._owner:
            raise NoLease(EXPIRED if self._expired else UNKNOWN)
        self._owner, self._in_place = owner, self._in_place or given.get("in_place") is True
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    @property
    def held(self) -> bool:
        return bool(self._owner)

    def check(self) -> None:
        """Raise NoLease if the lease has expired, and no trainer has begun another one since."""
        if self._expired:
            raise NoLease(EXPIRED)

    def whole(self) -> None:
        """Take note that the engine holds one version, whatever was written in place."""
        self._in_place = False

    def end(self) -> None:
        """Take note that the engine has resumed."""
        self._owner, self._in_place = "", False
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        in_place = self._in_place
        self.end()
        self._expired = True
        self._told = asyncio.ensure_future(self._tell(in_place))

"""The lease of an engine's pause, as its server keeps it.

A trainer that pauses an engine which it has not started takes the lease, and renews it until the engine has resumed:

    {"owner": "process 7 on host1 (5f3a)", "seconds": 10.0, "begin": true, "in_place": false}

"begin" takes the lease, otherwise it is renewed. "in_place" says that the trainer is about to write into the memory
that the engine computes with. When nobody has renewed the lease for its seconds, its owner has died or stands still,
and the server is told so that it may go on, or end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

HELD = "another run has paused this engine"  # trainers look for these four in an answer
EXPIRED = "nobody renewed the lease of this pause, and the engine went on"
UNKNOWN = "nobody holds the lease of this engine: it has resumed, or was started anew"
NONE = "this engine cannot keep a lease of its pause"
LONGEST = 3600.0  # seconds
LATE = 1.0  # seconds after the end at which the server itself must have stood still


class NoLease(Exception):
    """A trainer may not do what it asks for."""


class Lease:
    """The lease of one engine. All calls are made in one event loop, whose clock is no calendar and never jumps.

    Args:
        expired: called when nobody has renewed the lease; its argument says whether the owner may have written into the
            weights in place.
    """

    def __init__(self, expired: Callable[[bool], Awaitable[None]]):
        self._tell = expired
        self._owner = ""  # nobody
        self._until = self._seconds = 0.0
        self._in_place = self._expired = False
        self._watching: asyncio.Task[None] | None = None

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
        self._owner, self._seconds, self._until = owner, seconds, time.monotonic() + seconds
        self._in_place |= given.get("in_place") is True
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

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
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(left)
            if time.monotonic() > self._until + LATE:  # it has not read yet what came meanwhile
                self._until = time.monotonic() + self._seconds
        in_place, self._watching = self._in_place, None
        self.end()
        self._expired = True
        await self._tell(in_place)

"""The lease of an engine's pause, on the side of its server.

A trainer that pauses an engine which it has not started takes the lease. It renews it until the engine has resumed:

    {"owner": "process 7 on host1", "seconds": 10.0, "begin": true, "in_place": false}

"begin" takes the lease, otherwise it is renewed. "in_place" says that the trainer is about to write into the memory
that the engine computes with. If no request renews the lease for its seconds, its owner has died or stands still. Then
the server is notified: it may resume, or end.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

HELD = "another run has paused this engine"  # trainers look for these three in an answer
EXPIRED = "no request renewed the lease of this pause, and the engine resumed"
UNKNOWN = "no process holds the lease of this engine: it has resumed, or was restarted"
LONGEST = 3600.0  # seconds
GRACE = 10.0  # seconds from SIGTERM to the end
LATE = 1.0  # seconds after the end at which the server itself must have stood still
LOADED = "; some weights of the session were loaded before"  # ends the refusals of workers of which this is true
# Updates after which the engine computes as before: "complete" loads adapters, and "memory" loads nothing.
HARMLESS = ("lora", "lora_ipc", "lora_disk", "memory")
logger = logging.getLogger("vllm.instep")


class NoLease(RuntimeError):
    """A trainer may not do what it requests; `what` says why. instep reads the text as a refusal."""

    def __init__(self, what: str):
        super().__init__(f"WeightMismatch[]: {what}")
        self.what = what


async def end_server() -> None:
    """End this server with its other processes."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(GRACE)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


class Lease:
    """The lease of one engine. All calls are made in one event loop.

    Args:
        expired: called when the lease was not renewed; its argument says whether the owner may have written into the
            weights in place.
    """

    def __init__(self, expired: Callable[[bool], Awaitable[None]]):
        self._tell = expired
        self._owner = ""  # no owner
        self._in_place = self._expired = False
        self._timer: asyncio.TimerHandle | None = None
        self._told: asyncio.Future[None] | None = None  # a loop alone does not keep a task alive

    def ask(self, given: Any) -> None:
        """Begin or renew the lease, as a request asks.

        Raises:
            NoLease: another trainer holds it, it has expired, no trainer has begun it, or the request has another form.
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
        self._seconds = seconds
        self._begin()

    @property
    def held(self) -> bool:
        return bool(self._owner)

    def check(self) -> None:
        """Raise NoLease if the lease has expired, and no trainer has begun another one since."""
        if self._expired:
            raise NoLease(EXPIRED)

    def whole(self) -> None:
        """Note that the engine holds one version, whatever was written in place."""
        self._in_place = False

    def end(self) -> None:
        """Note that the engine has resumed."""
        self._owner, self._in_place = "", False
        self._stop()

    def _begin(self) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        assert self._timer is not None
        if asyncio.get_running_loop().time() > self._timer.when() + LATE:
            return self._begin()  # this process stood still, and has not read yet what came meanwhile
        in_place = self._in_place
        self.end()
        self._expired = True
        self._told = asyncio.ensure_future(self._tell(in_place))


class Keeper:
    """The lease of one engine, and its server's knowledge of the weights in it.

    Args:
        resume: lets the engine generate; end: ends it, if it may hold weights of two versions.
    """

    def __init__(self, resume: Callable[[], Awaitable[Any]], end: Callable[[], Awaitable[None]]):
        self.lease = Lease(self._expired)
        self._resume, self._end = resume, end
        self._version = ""  # announced by the session
        self._torn = False  # the engine may hold weights of two versions
        self._complete = False  # the last update has found all weights of its session there
        self.num_updates, self.last_update = 0, 0.0  # the number of completed sessions, and the time of the last one

    def begun(self, version: str) -> None:
        """Note that a session was announced."""
        self._complete, self._version = False, version

    @contextmanager
    def loading(self, backend: str, several: bool) -> Iterator[None]:
        """Note the result of an update. Raises NoLease.

        Args:
            several: whether the engine has replicas, so that one may load what another refuses.
        """
        self.lease.check()
        before, self._complete = self._torn, False
        self._torn = before or backend not in HARMLESS
        try:
            yield
        except Exception as error:  # any error of the engine: parts may be loaded
            self._torn = before or (several and backend not in HARMLESS) or LOADED in str(error)
            raise
        self._complete = backend == "complete"

    def finished(self) -> str | None:
        """Note the end of a session. Return the version that it has brought, None if it was abandoned."""
        if not self._complete:
            return None
        self._torn = self._complete = False
        self.lease.whole()
        self.num_updates, self.last_update = self.num_updates + 1, time.time()
        return self._version

    async def _expired(self, in_place: bool) -> None:
        if in_place or self._torn:
            logger.error("the lease of the pause is not renewed: the engine ends, its weights may be of two versions")
            await self._end()
        else:
            logger.warning("the lease of the pause is not renewed: the engine resumes with its earlier weights")
            await self._resume()

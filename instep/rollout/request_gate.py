"""The gate of a run's generation requests. A weight sync closes it, so that the version of every token is known."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from instep.system.run_context import PerRun

LOOK_SECONDS = 0.02
MOST_POINTS = 300  # of the course of one step


class RequestGate:
    """Admit requests to the policy, and count them.

    A request is under way from before it is sent until its answer is read. Some engines do not report which weights
    made a token. For them `version` says it: it changes only while no request is under way. Two kinds of requests pass
    the gate freely: those to other models, and those that do not go through `rollout/client.py`.

    Attributes:
        guarded: how the URLs of the policy's requests begin, which the gate holds back.
        closed: whether requests wait.
        num_under_way: how many were admitted and have no answer yet.
        packed: makes a request of which the policy's router drops nothing, of its path and JSON (`Router.packed`).
        version: of the weights that make tokens now; None: engines report it, or it is not known.
        num_cached_tokens: the capacity of the KV caches of the policy's engines together, which bounds how many samples
            rollouts send at once (`kv_budget.py`); inf: not known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_under_way = 0
        self._idle_since: float | None = time.monotonic()  # None: requests are under way
        self._idle_seconds = 0.0
        self._course: deque[tuple[float, int]] = deque(maxlen=200_000)  # when `num_under_way` changed, and to what
        self.reset()

    def reset(self) -> None:
        """Open the gate, for requests to any model, as in a new run."""
        self.guarded, self.num_cached_tokens = "", math.inf
        self.packed: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] = lambda _, payload: payload
        self.open()

    def guards(self, url: str) -> bool:
        return url.startswith(self.guarded)

    def close(self) -> None:
        with self._lock:
            self.closed = True

    def open(self, version: str | None = None) -> None:
        with self._lock:
            self.closed, self.version = False, version

    @contextlib.asynccontextmanager
    async def admitted(self, url: str) -> AsyncIterator[None]:
        """Wait until the gate is open, or the deadline of the sync that closed it is over; then count the request."""
        if not self.guards(url):
            yield
            return
        while not self._enter():
            await asyncio.sleep(LOOK_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._count(-1)

    def _enter(self) -> bool:
        with self._lock:
            if not self.closed:
                self._count(1)
            return not self.closed

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self.num_under_way += change
        self._course.append((round(time.time(), 4), self.num_under_way))
        if self._idle_since is not None and self.num_under_way:
            self._idle_seconds, self._idle_since = self._idle_seconds + now - self._idle_since, None
        elif not self.num_under_way:
            self._idle_since = now

    def take_course(self) -> list[tuple[float, int]]:
        """Return how many requests were under way since the last call: Unix seconds and the number from then on.

        Where more than `MOST_POINTS` parts of the time have changes, a part has its largest and its last number.
        """
        with self._lock:
            course, self._course = self._course, deque(maxlen=self._course.maxlen)
        if len(course) <= MOST_POINTS:
            return list(course)
        begin, width = course[0][0], (course[-1][0] - course[0][0]) / (MOST_POINTS // 2) or 1.0
        parts: dict[int, list[tuple[float, int]]] = {}
        for at, number in course:
            parts.setdefault(int((at - begin) / width), []).append((at, number))
        return [point for part in parts.values() for point in (max(part, key=lambda p: p[1]), part[-1])]

    def idle_seconds(self) -> float:
        """Return for how long no request to the policy was under way, since the run began."""
        with self._lock:
            return self._idle_seconds + (0.0 if self._idle_since is None else time.monotonic() - self._idle_since)


gate = PerRun(RequestGate)

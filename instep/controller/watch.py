"""A rollout function runs in a thread of its own, while this one watches processes, memory and the clock.

A user's rollout function may block for as long as it likes; the death of an engine, an expired bound or Ctrl-C must
still end the run in seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TypeVar

import psutil

from instep.errors import NoAnswerError, RolloutError
from instep.rollout import runtime
from instep.system.kernel import name_of, state_of, stopped
from instep.system.processes import Process, in_thread

T = TypeVar("T")
logger = logging.getLogger(__name__)
ALARM_BYTES = 2 << 30  # growth of the controller that is worth a warning, and again at each doubling
LOOK_SECONDS = 1.0  # between two looks for processes that stand stopped
LIMIT_RATIO = 0.5  # of the memory that was available at the start: growth that ends the run, before the kernel does


class Watch:
    """Watches what a rollout depends on.

    Args:
        check: raises if a process of the run has died or was stopped.
        hooks: the names of the user's functions that run in this process, for messages.
        limit_gb: the growth of this process that ends the run; None: half of the memory that is available now.
        dying_seconds: how long an engine that does not answer may take to end, and so to be named as the cause.
    """

    def __init__(
        self, check: Callable[[], None], hooks: str, limit_gb: float | None = None, dying_seconds: float = 0.0
    ):
        self._check, self._hooks = check, hooks or "none"
        self._dying_seconds = dying_seconds
        self._process = psutil.Process()
        self._first_rss: int | None = None
        self._alarm = ALARM_BYTES
        self._limit = limit_gb * 1e9 if limit_gb else LIMIT_RATIO * psutil.virtual_memory().available

    def run(
        self, work: Callable[[], T], *, timeout: float, what: str, meanwhile: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of `work()`, and call `meanwhile` again and again until it is there.

        Raises:
            EngineError, WorkerError: an engine or a worker died or was stopped meanwhile.
            RolloutError: `timeout` seconds have passed, or the memory of this process grows without end.
        """
        outcome = in_thread(work, what)
        deadline = time.monotonic() + timeout
        try:
            while not outcome.done():
                wait([outcome], 0.1)
                self._check()
                self._check_memory(what)
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"{what} did not end within {timeout:.0f} s",
                        where=f"--rollout-timeout; hooks: {self._hooks}",
                        remedy="look at the engines' logs and at your hooks (an async function must not block); "
                        "raise the bound if the work is larger",
                    )
                if not outcome.done():  # what is left belongs to whoever takes the result
                    meanwhile()
        except BaseException:  # also Ctrl-C
            runtime.cancel_all()
            wait([outcome], 2.0)
            raise
        if (failure := outcome.exception()) is not None:
            deadline = time.monotonic() + (self._dying_seconds if isinstance(failure, NoAnswerError) else 0.0)
            while time.monotonic() < deadline:
                self._check()
                time.sleep(0.1)
            self._check()  # a dead engine is the cause of what its clients say
        return outcome.result()

    def _check_memory(self, what: str) -> None:
        rss = self._process.memory_info().rss
        self._first_rss = self._first_rss or rss
        grown = rss - self._first_rss
        says = f"the controller has grown by {grown / 1e9:.1f} GB since its first rollout"
        where = f"{what}; the hooks that run in it: {self._hooks}"
        if grown > self._limit:
            remedy = "let the hooks keep less, or raise --controller-memory-limit; run again to resume"
            raise RolloutError(f"{says}, more than {self._limit / 1e9:.1f} GB", where=where, remedy=remedy)
        if grown > self._alarm:
            self._alarm = 2 * grown
            logger.warning("%s (%s): does one of them keep what it should let go?", says, where)


class StandstillWatch:
    """Tells of each process under this one that stands stopped (SIGSTOP), in every phase, from a thread of its own.

    What is to be done about it is decided where somebody waits for the process: a training worker or the last engine
    ends the run, one of several engines is started anew.

    Args:
        processes: returns those of the run that have names; others are called by the kernel's name.
        tell: shows a line to the user.
    """

    def __init__(self, processes: Callable[[], Sequence[Process]], tell: Callable[[str], None]):
        self._processes, self._tell = processes, tell
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="standstill", daemon=True)

    def _loop(self) -> None:
        told = set[int]()
        while not self._closed.wait(LOOK_SECONDS):
            still = set(stopped(os.getpid()))
            names = {process.pid: process.name for process in self._processes()} if still ^ told else {}
            for pid in sorted(still ^ told):
                process = f"{names.get(pid) or name_of(pid)} (pid {pid})"
                if pid in still:
                    self._tell(f"{process} stands stopped: somebody sent it SIGSTOP; kill -CONT {pid} lets it go on")
                elif state_of(pid) not in ("", "zombie"):
                    self._tell(f"{process} goes on")
            told = still

    def __enter__(self) -> StandstillWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()

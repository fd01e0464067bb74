"""Run a rollout function in a separate thread, while this one watches processes, memory and the clock.

A user's rollout function may block for a long time. The death of an engine, an expired time limit or Ctrl-C must
still end the run within seconds.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

import psutil
import torch

from instep.errors import NoAnswerError, RolloutError
from instep.rollout import runtime
from instep.system.processes import in_thread
from instep.system.shared import shared_by_runs

T = TypeVar("T")
LIMIT_RATIO = 0.5  # of the free memory at the start: larger growth ends the run, before the kernel does


class Watch:
    """Watch the processes, memory and time limit of a rollout.

    Args:
        check: raises if a process of the run died or was stopped.
        hooks: the names of the user's functions in this process, for messages.
        limit_gb: the growth of this process that ends the run; None: half of the memory that is available now.
        dying_seconds: how long to wait for the end of an engine that does not answer, to name it as the cause.
    """

    def __init__(
        self, check: Callable[[], None], hooks: str, limit_gb: float | None = None, dying_seconds: float = 0.0
    ):
        self._check, self._hooks = check, hooks or "none"
        self._dying_seconds = dying_seconds
        self._process = psutil.Process()
        self._first_rss: int | None = None
        self._limit = limit_gb * 1e9 if limit_gb else LIMIT_RATIO * psutil.virtual_memory().available

    def run(
        self, work: Callable[[], T], *, timeout: float, what: str, meanwhile: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of `work()`; call `meanwhile` again and again until then.

        Raises:
            EngineError, WorkerError: an engine or a worker died or was stopped meanwhile.
            RolloutError: `timeout` seconds have passed, or the memory of this process grows too much.
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
                        "raise the limit if the work is larger",
                    )
                if not outcome.done():  # after the end the caller does the rest
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
            self._check()  # clients fail because of a dead engine: report that first
        return outcome.result()

    def _check_memory(self, what: str) -> None:
        rss = self._process.memory_info().rss
        self._first_rss = self._first_rss or rss
        if (grown := rss - self._first_rss) > self._limit:
            raise RolloutError(
                f"the controller has grown by {grown / 1e9:.1f} GB since its first rollout, more than "
                f"{self._limit / 1e9:.1f} GB",
                where=f"{what}; the hooks that run in it: {self._hooks}",
                remedy="let the hooks keep less, or raise --controller-memory-limit; run again to resume",
            )


@shared_by_runs
def collect_seldom() -> Callable[[], None]:
    """Search for garbage cycles rarely, and not among present objects; return a function that ends this.

    Python's thresholds (700, 10, 10) would cost a quarter of the controller's time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(400_000, 20, 20)

    def undo() -> None:
        gc.unfreeze()
        gc.set_threshold(*before)

    return undo


_of_thread = threading.local()  # `before`: torch's number of threads in this thread, once for each run


def compute_in_one_thread() -> Callable[[], None]:
    """Give torch one thread here, as a pool would spin between the controller's short operations; return the undo."""
    before: list[int] = vars(_of_thread).setdefault("before", [])
    before.append(torch.get_num_threads())
    torch.set_num_threads(1)

    def undo() -> None:
        number = before.pop()
        if not before:
            torch.set_num_threads(number)

    return undo

"""Run a rollout function in a thread of its own, while this one watches engines, workers and the clock.

A user's rollout function may block for as long as it likes; the death of an engine, an expired bound or Ctrl-C must
still end the run in seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from instep.cluster.local import WorkerGroup
from instep.engines.launch import Engine
from instep.errors import RolloutError
from instep.rollout import runtime

T = TypeVar("T")


def run_watched(
    work: Callable[[], T], engines: Sequence[Engine], workers: WorkerGroup, *, timeout: float, what: str
) -> T:
    """The result of `work()`.

    Raises:
        EngineError, WorkerError: an engine or a worker died meanwhile.
        RolloutError: `timeout` seconds have passed.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - handed over to the watching thread, which raises it
            failure.append(error)

    thread = threading.Thread(target=target, name=what, daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    try:
        while thread.is_alive():
            thread.join(0.1)
            for engine in engines:
                engine.check_alive()
            workers.check_alive()
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"{what} did not end within {timeout:.0f} s",
                    where="--rollout-timeout",
                    remedy="look at the engines' logs and at your hooks; raise the bound if the work is larger",
                )
    except BaseException:
        runtime.cancel_all()
        thread.join(2.0)
        raise
    if failure:
        for engine in engines:
            engine.check_alive()  # a dead engine is the cause of what its clients say
        raise failure[0]
    return outcome[0]

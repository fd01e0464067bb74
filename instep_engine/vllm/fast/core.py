"""A pause sends the tokens that the scheduler holds back while the engine still has the weights that made them.

`abort` does so before the requests end, so that they end with all their tokens. `keep` and `wait` do so after the last
step; a preempted request outlives a `wait`, too. vLLM 0.32 writes its weight version into each message, and so does
this module; for older versions there is `versions.py`. Besides, a core that has nothing to do waits for the rest of a
rollout's requests, so that one step begins all of them.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc

from instep_engine.vllm.fast import versions

SILENCE = 0.003  # seconds without a new request after which the first step begins
LONGEST = 0.03  # seconds after which it begins in any case


def install() -> None:
    """Let pauses flush, and first steps wait, once in an engine core."""
    stock = EngineCoreProc.pause_scheduler
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def pause_scheduler(self: EngineCoreProc, mode: Any = "abort", clear_cache: bool = True) -> Future[Any] | None:
        if mode == "abort":
            flush(self)
        paused = stock(self, mode, clear_cache)
        if mode != "abort" and paused is None:
            flush(self)
        elif mode != "abort":
            paused.add_done_callback(lambda _: flush(self))  # before the callback that answers the caller
        return paused

    stock_input = EngineCoreProc._process_input_queue

    @functools.wraps(stock_input)
    def process_input_queue(self: EngineCoreProc) -> None:
        idle = not self.has_work()
        stock_input(self)
        end, scheduler = time.monotonic() + LONGEST, self.scheduler
        while idle and scheduler.waiting and scheduler.pause_state is PauseState.UNPAUSED and time.monotonic() < end:
            time.sleep(SILENCE)
            if self.input_queue.empty():
                break
            stock_input(self)

    EngineCoreProc.pause_scheduler, EngineCoreProc._process_input_queue = pause_scheduler, process_input_queue
    versions.install(EngineCoreProc)


def flush(core: EngineCoreProc) -> None:
    """Send the held-back tokens of all requests."""
    messages: dict[int, EngineCoreOutputs] = {}
    version = getattr(core, "_weight_version", None)  # from 0.32 on
    for client, output in core.scheduler.flush():
        message = messages.setdefault(client, EngineCoreOutputs())
        message.outputs.append(output)
        if version is not None:
            message.weight_version = version
    for client, message in messages.items():
        core.output_queue.put_nowait((client, message))

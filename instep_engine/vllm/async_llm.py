"""The API server keeps the lease of its engine's pause (`lease.py`), by which it knows that a trainer has died.

    POST /init_weight_transfer_engine {"init_info": {"lease": {...}}}

It also tells the engine core which version a session has brought (`fast/versions.py`).

It is for engines that instep has not started; those end with their trainer. When the lease expires the engine goes on
with the weights that it had. Where it may hold some of two versions, it ends: a session has loaded some and was not
completed, or the trainer has written in place.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from instep_engine.lease import Lease
from instep_engine.vllm.fast.versions import tell

logger = logging.getLogger("vllm.instep")
GRACE = 10.0  # seconds from SIGTERM to the end
LOADED = "; some weights of the session were loaded before"  # ends the refusals of workers of which this is true
# Updates after which the engine computes as before: "complete" loads adapters, and "memory" loads nothing.
HARMLESS = ("lora", "lora_ipc", "lora_disk", "memory")
WRAPPED = ("init_weight_transfer_engine", "update_weights", "finish_weight_update", "resume_generation")  # of AsyncLLM


class Loaded:
    """The adapter that `/lora/load` (`atropos.py`) has loaded; it serves requests that name none.

    `request` is vLLM's, None without one; `count` is of all loads.
    """

    request: Any = None
    count = 0


class Keeper:
    """The lease of one engine, and what its server knows of the weights in it.

    Args:
        resume: lets the engine generate; end: ends it.
    """

    def __init__(self, resume: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]):
        self.lease = Lease(self._expired)
        self._resume, self._end = resume, end
        self.version = ""  # that the session announced
        self.torn = False  # the engine may hold weights of two versions
        self.complete = False  # the last update has found all weights of its session there
        self.num_updates, self.last_update = 0, 0.0  # sessions that were completed, and when the last one was

    async def _expired(self, in_place: bool) -> None:
        if in_place or self.torn:
            logger.error(
                "nobody renews the lease of the pause in a session: the engine ends, its weights may be of two"
            )
            await self._end()
        else:
            logger.warning("nobody renews the lease of the pause: the engine goes on with the weights that it had")
            await self._resume()


async def _end_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(GRACE)
    for child in multiprocessing.active_children():  # its engine core
        child.kill()
    os._exit(1)


def install(llm: Any, end: Callable[[], Awaitable[None]] = _end_server) -> None:
    """Let servers with an engine of the class `llm`, vLLM's `AsyncLLM`, keep a lease. Once in a process.

    A class without the methods that are known here keeps none, and its workers refuse a trainer that asks for one.

    Args:
        end: ends the server with its engine.
    """
    known = [getattr(llm, name, None) for name in WRAPPED]
    if any(hasattr(method, "__wrapped__") for method in known):
        return
    for name, method in zip(WRAPPED, known, strict=True):
        if not inspect.iscoroutinefunction(method):
            logger.warning("instep: no lease of pauses, as this vLLM's AsyncLLM.%s is another", name)
            return
    init, update, finish, resume = known

    def keeper_of(self: Any) -> Keeper:
        if "_instep_keeper" not in self.__dict__:
            self._instep_keeper = Keeper(lambda: resume(self), end)
        return self._instep_keeper

    @functools.wraps(init)
    async def init_weight_transfer_engine(self: Any, request: Any) -> None:
        keeper, info = keeper_of(self), request.init_info
        if "lease" in info:
            return keeper.lease.ask(info["lease"])
        keeper.lease.check()
        await init(self, request)
        keeper.complete, keeper.version = False, str(info.get("version", ""))

    @functools.wraps(update)
    async def update_weights(self: Any, request: Any) -> None:
        keeper, backend = keeper_of(self), request.update_info.get("backend")
        keeper.lease.check()
        before, keeper.complete = keeper.torn, False
        keeper.torn = before or backend not in HARMLESS
        try:
            await update(self, request)
        except Exception as error:  # whatever vLLM raises: parts may be loaded, also by another replica
            several = self.vllm_config.parallel_config.data_parallel_size > 1
            keeper.torn = before or (several and backend not in HARMLESS) or LOADED in str(error)
            raise
        keeper.complete = backend == "complete"

    @functools.wraps(finish)
    async def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> None:
        keeper = keeper_of(self)
        keeper.lease.check()
        await finish(self, *args, **kwargs)
        if keeper.complete:  # else a session ends that was given up
            await tell(self, keeper.version)
            keeper.torn = keeper.complete = False
            keeper.lease.whole()
            keeper.num_updates, keeper.last_update = keeper.num_updates + 1, time.time()
            Loaded.request = None  # a trainer's adapter is newer

    @functools.wraps(resume)
    async def resume_generation(self: Any) -> None:
        await resume(self)
        keeper_of(self).lease.end()

    wrapped = (init_weight_transfer_engine, update_weights, finish_weight_update, resume_generation)
    for name, method in zip(WRAPPED, wrapped, strict=True):
        setattr(llm, name, method)

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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from instep_engine.lease import Lease, NoLease
from instep_engine.vllm.fast.versions import tell
from instep_engine.vllm.loaded import Loaded

logger = logging.getLogger("vllm.instep")
GRACE = 10.0  # seconds from SIGTERM to the end
LOADED = "; some weights of the session were loaded before"  # ends the refusals of workers of which this is true
# Updates after which the engine computes as before: "complete" loads adapters, and "memory" loads nothing.
HARMLESS = ("lora", "lora_ipc", "lora_disk", "memory")
WRAPPED = {  # methods of AsyncLLM, with the parameters that are read here
    "init_weight_transfer_engine": ["request"],
    "update_weights": ["request"],
    "finish_weight_update": [],
    "resume_generation": [],
}


class Keeper:
    """The lease of one engine, and what its server knows of the weights in it.

    Args:
        resume: lets the engine generate; end: ends it; brought: hears which version a session has brought.
        several: whether the engine has data-parallel replicas, of which one may load what another refuses.
    """

    def __init__(
        self,
        resume: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        brought: Callable[[str], Awaitable[None]],
        several: bool,
    ):
        self.lease = Lease(self._expired)
        self._resume, self._end, self._brought, self._several = resume, end, brought, several
        self._version = ""  # that the session announced
        self._torn = False  # the engine may hold weights of two versions
        self._complete = False  # the last update has found all weights of its session there
        self.num_updates, self.last_update = 0, 0.0  # sessions that were completed, and when the last one was

    def ask(self, given: Any) -> None:
        with _told():
            self.lease.ask(given)

    def check(self) -> None:
        with _told():
            self.lease.check()

    async def begin(self, begin: Callable[[], Awaitable[None]], announced: Any) -> None:
        self.check()
        await begin()
        self._complete = False
        self._version = str(announced.get("version", "")) if isinstance(announced, dict) else ""

    async def update(self, load: Callable[[], Awaitable[None]], info: Any) -> None:
        self.check()
        backend = info.get("backend") if isinstance(info, dict) else None
        before, self._complete = self._torn, False
        self._torn = before or backend not in HARMLESS
        try:
            await load()
        except Exception as error:  # whatever vLLM raises: parts may be loaded
            self._torn = before or (self._several and backend not in HARMLESS) or LOADED in str(error)
            raise
        self._complete = backend == "complete"

    async def finish(self, finish: Callable[[], Awaitable[None]]) -> None:
        self.check()
        await finish()
        if self._complete:  # else a session ends that was given up
            await self._brought(self._version)
            self._torn = self._complete = False
            self.lease.whole()
            self.num_updates, self.last_update = self.num_updates + 1, time.time()
            Loaded.request = None  # a trainer's adapter is newer

    async def _expired(self, in_place: bool) -> None:
        if not in_place and not self._torn:
            logger.warning("nobody renews the lease of the pause: the engine goes on with the weights that it had")
            await self._resume()
            return
        logger.error("nobody renews the lease of the pause in a session: the engine ends, its weights may be of two")
        await self._end()


@contextmanager
def _told() -> Iterator[None]:
    """Words what the lease says as instep reads a refusal."""
    try:
        yield
    except NoLease as error:
        raise RuntimeError(f"WeightMismatch[]: {error}") from None


async def _end_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(GRACE)
    for child in multiprocessing.active_children():  # its engine core
        child.kill()
    os._exit(1)


def install(llm: Any, end: Callable[[], Awaitable[None]] = _end_server) -> None:
    """Let servers with an engine of the class `llm`, vLLM's `AsyncLLM`, keep a lease. Once in a process.

    Where the class has not the methods that are known here no lease is kept: an engine would stay paused for ever when
    its trainer has died, so its workers refuse a trainer that asks for one (`engine.py`).

    Args:
        end: ends the server with its engine.
    """
    known = {name: getattr(llm, name, None) for name in WRAPPED}
    if any(hasattr(method, "__wrapped__") for method in known.values()):
        return
    for name, method in known.items():
        if not inspect.iscoroutinefunction(method) or not {*WRAPPED[name]} <= {*inspect.signature(method).parameters}:
            logger.warning("instep: no lease of pauses, as this vLLM's AsyncLLM.%s is another", name)
            return
    init, update, finish, resume = known.values()

    def keeper(self: Any) -> Keeper:
        if "_instep_keeper" not in self.__dict__:
            several = self.vllm_config.parallel_config.data_parallel_size > 1
            self._instep_keeper = Keeper(lambda: resume(self), end, lambda version: tell(self, version), several)
        return self._instep_keeper

    @functools.wraps(init)
    async def init_weight_transfer_engine(self: Any, request: Any) -> None:
        if isinstance(request.init_info, dict) and "lease" in request.init_info:
            keeper(self).ask(request.init_info["lease"])
        else:
            await keeper(self).begin(lambda: init(self, request), request.init_info)

    @functools.wraps(update)
    async def update_weights(self: Any, request: Any) -> None:
        await keeper(self).update(lambda: update(self, request), request.update_info)

    @functools.wraps(finish)
    async def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> None:
        await keeper(self).finish(lambda: finish(self, *args, **kwargs))

    @functools.wraps(resume)
    async def resume_generation(self: Any) -> None:
        await resume(self)
        keeper(self).lease.end()

    llm.init_weight_transfer_engine, llm.update_weights = init_weight_transfer_engine, update_weights
    llm.finish_weight_update, llm.resume_generation = finish_weight_update, resume_generation

"""The API server keeps the lease of its engine's pause (`lease.py`), so it notices the death of a trainer.

    POST /init_weight_transfer_engine {"init_info": {"lease": {...}}}

It also passes the version of a session to the engine core (`fast/versions.py`).

It is for engines that instep has not started; others end with their trainer. When the lease expires, the engine resumes
with the weights that it had. But it ends if it may hold weights of two versions: an incomplete session has loaded some,
or the trainer has written in place.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from instep_engine.lease import Keeper, end_server
from instep_engine.vllm.fast.versions import tell

logger = logging.getLogger("vllm.instep")
WRAPPED = ("init_weight_transfer_engine", "update_weights", "finish_weight_update", "resume_generation")  # of AsyncLLM


class Loaded:
    """The adapter that `/lora/load` (`atropos.py`) has loaded. It serves requests without an adapter.

    `request` is vLLM's, None without one; `count` is of all loads.
    """

    request: Any = None
    count = 0


def install(llm: Any, end: Callable[[], Awaitable[None]] = end_server) -> None:
    """Let servers with an engine of the class `llm`, vLLM's `AsyncLLM`, keep a lease. Once in a process.

    A class without the known methods keeps no lease, and its workers refuse a trainer that requests one.

    Args:
        end: ends the server with its engine.
    """
    known = [getattr(llm, name, None) for name in WRAPPED]
    if any(hasattr(method, "__wrapped__") for method in known):
        return
    for name, method in zip(WRAPPED, known, strict=True):
        if not inspect.iscoroutinefunction(method):
            logger.warning("instep: no lease of pauses, because this vLLM's AsyncLLM.%s is different", name)
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
        keeper.begun(str(info.get("version", "")))

    @functools.wraps(update)
    async def update_weights(self: Any, request: Any) -> None:
        several = self.vllm_config.parallel_config.data_parallel_size > 1
        with keeper_of(self).loading(request.update_info.get("backend"), several):
            await update(self, request)

    @functools.wraps(finish)
    async def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> None:
        keeper = keeper_of(self)
        keeper.lease.check()
        await finish(self, *args, **kwargs)
        if (version := keeper.finished()) is not None:
            await tell(self, version)
            Loaded.request = None  # a trainer's adapter is newer

    @functools.wraps(resume)
    async def resume_generation(self: Any) -> None:
        await resume(self)
        keeper_of(self).lease.end()

    wrapped = (init_weight_transfer_engine, update_weights, finish_weight_update, resume_generation)
    for name, method in zip(WRAPPED, wrapped, strict=True):
        setattr(llm, name, method)

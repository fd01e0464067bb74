"""The scheduler of fast requests: `--scheduler-cls instep_engine.vllm.fast.scheduler.make`.

Stock vLLM sends an object for each token of each request to its API server. Here the tokens of a fast request leave in
bunches: the first at once, then every `BUNCH`, the last with the end. Held-back tokens leave before a pause is over
(`core.py`), so no message mixes tokens of two weight versions. If the API server aborts a request, for example because
its client has left, its held-back tokens are dropped. Its answer so far is the beginning of its response.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from instep_engine.vllm.fast import BUNCH, RANGE, VERSIONS, is_known, minor_version
from instep_engine.vllm.fast.hold_back import HoldBack

logger = init_logger("vllm.instep")


class FastScheduler(HoldBack, Scheduler):
    pass


class FastAsyncScheduler(HoldBack, AsyncScheduler):
    pass


def make(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler for this configuration; vLLM calls it like a scheduler class."""
    from instep_engine.vllm.fast.core import install

    is_async = vllm_config.scheduler_config.async_scheduling
    if minor_version() not in VERSIONS:
        logger.info("instep: vLLM's own scheduler, because this version is not tested (%s)", RANGE)
        return (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **kwargs)
    install()
    logger.info("instep: tokens of fast requests leave the engine core every %d", BUNCH)
    if not is_async:
        logger.info("instep: vLLM's own loops, because there is no asynchronous scheduling")
        return FastScheduler(vllm_config=vllm_config, **kwargs)
    if not is_known():
        logger.info("instep: vLLM's own loops, because this is not vLLM 0.26")
        return FastAsyncScheduler(vllm_config=vllm_config, **kwargs)
    from instep_engine.vllm.fast.decode import QuickScheduler

    return QuickScheduler(vllm_config=vllm_config, **kwargs)

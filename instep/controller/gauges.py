"""The memory of each process of a run, and the tokens of each engine, for timeline.jsonl."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from instep.controller.deployment import Deployment
from instep.engines.engine import Engine
from instep.errors import ConfigError
from instep.observability.memory import PssSampler

ASK_SECONDS = 2.0


def gauges(deployment: Deployment, memory: PssSampler, *, one_host: bool) -> list[dict[str, Any]]:
    """Return a row for the controller, each rank and each engine.

    A row has `name`; `host_bytes`, the PSS of the process with its children, on one host; for a rank what its GPU has
    (`Worker.memory`, at the end of the last phase that asked); for an engine `num_generated`, its tokens since it
    started, if it tells.
    """
    processes = deployment.processes if one_host else []
    pids = {process.name: process.pid for process in processes}
    used = memory.by_owner(pids.values())
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in pids}
    for name, pid in pids.items():
        if pid in used:  # else it began after the last sample
            rows[name]["host_bytes"] = used.pop(pid)
    (own,) = used.values()
    if deployment.trainer is not None:
        actor = deployment.trainer.actor
        for process, of_gpu in zip(actor.workers.processes, actor.rank_memory, strict=False):  # no rank was asked yet
            rows.setdefault(process.name, {"name": process.name}).update(of_gpu)
    with ThreadPoolExecutor(max_workers=16) as threads:
        for engine, tokens in zip(deployment.engines, threads.map(_tokens, deployment.engines), strict=True):
            rows.setdefault(engine.name, {"name": engine.name})["num_generated"] = tokens
    return [{"name": "controller", "host_bytes": own}, *rows.values()]


def _tokens(engine: Engine) -> float | None:
    try:
        return engine.kind.num_generated(engine, ASK_SECONDS)
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, ConfigError):
        return None  # it starts again, or is another program's

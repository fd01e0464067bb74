"""What `instep_engine/vllm/fast/` does in a version of vLLM that nobody has tried: nothing, and it says so."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "version, on", [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("1.0", False)]
)
def test_requests_go_on_to_vllms_own_route(monkeypatch: Any, caplog: Any, version: str, on: bool) -> None:
    import vllm.version

    from instep_engine import answers
    from instep_engine.vllm.fast import api

    monkeypatch.setattr(vllm.version, "__version__", version)
    reached: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(await receive())

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "path": api.GENERATE,
        "method": "POST",
        "headers": [(b"accept", answers.CONTENT_TYPE.encode())],
    }
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.instep"):
        asyncio.run(api.Middleware(app)(scope, receive, None))
    assert bool(reached) is not on  # it reads the request itself where it is on
    assert ("not tested (0.26 to 0.32)" in caplog.text) is not on


@pytest.mark.parametrize("is_async", [True, False])
def test_the_scheduler_is_vllms_own(monkeypatch: Any, is_async: bool) -> None:
    import vllm.version
    from vllm.v1.engine.core import EngineCoreProc

    from instep_engine.vllm.fast import scheduler

    monkeypatch.setattr(vllm.version, "__version__", "0.33.0")
    before = EngineCoreProc.pause_scheduler
    for name in ("AsyncScheduler", "Scheduler"):
        monkeypatch.setattr(scheduler, name, lambda vllm_config, name=name: name)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    assert scheduler.make(config) == ("AsyncScheduler" if is_async else "Scheduler")
    assert EngineCoreProc.pause_scheduler is before

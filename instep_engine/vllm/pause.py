"""`POST /instep/pause?mode=abort|keep|wait`: vLLM's `/pause` without the 20 ms that it waits after the pause.

It waits them so that callers see the last answers before its own; instep counts the requests that are under way.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

from instep_engine.vllm.kv_params import Message, Send

PATH = "/instep/pause"
MODES = ("abort", "keep", "wait")


async def answer(scope: Message, send: Send) -> None:
    """Pause the engine core, and drop its caches."""
    mode = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("mode", ["abort"])[-1]
    status, body = 200, {"status": "paused"}
    if mode in MODES:
        engine = scope["app"].state.engine_client
        await engine.renderer.clear_mm_cache_async()
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
    else:
        status, body = 400, {"error": f"no such mode: {mode!r}"}
    text = json.dumps(body).encode()
    fields: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(text))}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})

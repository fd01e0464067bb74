"""A middleware that requires a key: `--middleware instep_engine.vllm.auth.Middleware`, the last and so the outermost.

vLLM's own key covers only generation. Its control routes, such as /update_weights or /collective_rpc, need no key. This
middleware also answers two routes that vLLM lacks: `POST /instep/pause?mode=abort|keep|wait` and `/generate`
(`sglang.py`).
"""

from __future__ import annotations

from urllib.parse import parse_qs

from instep_engine.asgi import Message, Receive, Send, reply
from instep_engine.guard import Guarded
from instep_engine.vllm import sglang

PAUSE, MODES = "/instep/pause", ("abort", "keep", "wait")


class Middleware(Guarded):
    async def serve(self, scope: Message, receive: Receive, send: Send) -> None:
        posted = scope["path"] if (scope["type"], scope.get("method")) == ("http", "POST") else ""
        if posted == PAUSE:
            await _pause(scope, send)
        elif posted == sglang.PATH:
            await sglang.answer(self.app, scope, receive, send)
        else:
            await super().serve(scope, receive, send)


async def _pause(scope: Message, send: Send) -> None:
    """Pause the engine core, and drop its caches. vLLM's `/pause` waits 20 ms more after the pause.

    It waits so that callers see the last answers before its own. instep counts its running requests instead.
    """
    mode = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("mode", ["abort"])[-1]
    if mode not in MODES:
        return await reply(send, 400, {"error": f"no such mode: {mode!r}"})
    engine = scope["app"].state.engine_client
    await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
    await reply(send, 200, {"status": "paused"})

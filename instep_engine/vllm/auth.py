"""A middleware that requires a key: `--middleware instep_engine.vllm.auth.Middleware`, the last and so the outermost.

vLLM's own key covers only generation. Its control routes, such as /update_weights or /collective_rpc, need no key. This
middleware also answers two routes that vLLM lacks: `POST /instep/pause?mode=abort|keep|wait` and `/generate`
(`sglang.py`).
"""

from __future__ import annotations

from urllib.parse import parse_qs

from instep_engine.asgi import App, Message, Receive, Send, reply
from instep_engine.guard import Guard
from instep_engine.vllm import sglang

PAUSE, MODES = "/instep/pause", ("abort", "keep", "wait")


class Middleware:
    """An ASGI middleware that passes on the requests that `guard.Guard` accepts.

    Raises:
        ValueError: the environment holds no key.
    """

    def __init__(self, app: App):
        self.app, self.guard = app, Guard.from_environment()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] != "lifespan":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self.guard.refusal(scope["path"], headers, (scope.get("server") or ("",))[0])
        posted = scope["path"] if (scope["type"], scope.get("method")) == ("http", "POST") else ""
        if refusal is None and posted == PAUSE:
            await _pause(scope, send)
        elif refusal is None and posted == sglang.PATH:
            await sglang.answer(self.app, scope, receive, send)
        elif refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            kind = "Unauthorized" if refusal[0] == 401 else "Forbidden"
            await reply(send, refusal[0], {"error": {"message": refusal[1], "type": kind, "code": refusal[0]}})


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

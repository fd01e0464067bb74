"""A middleware that asks for a key: `--middleware instep_engine.vllm.auth.Middleware`, the last and so the outermost.

vLLM's own key covers generation only; its control routes, such as /update_weights or /collective_rpc, ask for nothing.
Two routes that vLLM lacks are answered here: `pause.py` and `sglang.py`.
"""

from __future__ import annotations

import json
from typing import Any

from instep_engine.guard import Guard
from instep_engine.vllm import pause, sglang
from instep_engine.vllm.kv_params import App, Message, Receive, Send


class Middleware:
    """An ASGI middleware that passes on what `guard.Guard` lets pass.

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
        if refusal is None and posted == pause.PATH:
            await pause.answer(scope, send)
        elif refusal is None and posted == sglang.PATH:
            await sglang.answer(self.app, scope, receive, send)
        elif refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            await _answer(send, *refusal)


async def _answer(send: Send, status: int, message: str) -> None:
    error = {"message": message, "type": "Unauthorized" if status == 401 else "Forbidden", "code": status}
    body = json.dumps({"error": error}).encode()
    fields: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body))}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

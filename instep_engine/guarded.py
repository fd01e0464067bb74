"""An ASGI middleware that passes on the requests that `guard.Guard` accepts."""

from __future__ import annotations

from instep_engine.asgi import App, Message, Receive, Send, reply
from instep_engine.guard import Guard


class Guarded:
    """The middleware of an engine's server. A subclass may serve routes of its own (`serve`).

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
        if refusal is None:
            await self.serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            kind = "Unauthorized" if refusal[0] == 401 else "Forbidden"
            await reply(send, refusal[0], {"error": {"message": refusal[1], "type": kind, "code": refusal[0]}})

    async def serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer an accepted request."""
        await self.app(scope, receive, send)

"""A middleware that refuses requests while the engine sleeps: `--middleware instep_engine.vllm.sleep.Middleware`.

vLLM would keep them waiting until it wakes, and then answer them with unproven weights.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from instep_engine.asgi import App, Message, Receive, Send, reply

GENERATION = ("/v1/", "/inference/", "/generate")
TAGS = frozenset({"weights", "kv_cache"})  # vLLM's names of the memory that sleep frees
BODY = {"message": "the engine sleeps while the trainer works on its GPU", "type": "Asleep", "code": 503}


class Middleware:
    """Answers 503 to generation from the beginning of /sleep until weights and KV cache are awake.

    A failed sleep counts as a sleep, because the state of the engine is unknown, unless it was refused (4xx).
    """

    def __init__(self, app: App):
        self.app, self.asleep = app, frozenset[str]()  # the tags without memory

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        status = 500  # also if the app raises

        async def send_on(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if self.asleep and path.startswith(GENERATION):
            await reply(send, 503, {"error": BODY})
        else:
            before = self.asleep
            if path == "/sleep":
                self.asleep = TAGS
            await self.app(scope, receive, send_on)
            if path == "/sleep" and 400 <= status < 500:
                self.asleep = before
            elif path == "/wake_up" and status < 300:
                self.asleep -= set(parse_qs(scope["query_string"].decode()).get("tags", TAGS))

"""ASGI, as the middlewares of engines use it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

GENERATE = "/inference/v1/generate"  # vLLM's own route for tokens

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


async def body_of(receive: Receive) -> bytes | None:
    """Return the whole body of a request; None if the client has gone."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
    return None


def with_body(body: bytes, scope: Message, receive: Receive) -> tuple[Message, Receive]:
    """Return `scope` and `receive` of the same request with another body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return first.pop() if first else await receive()

    return {**scope, "headers": headers}, receive_body


async def reply(send: Send, status: int, answer: Any, content_type: str = "application/json") -> None:
    """Send a whole answer: bytes, or a value that becomes JSON."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

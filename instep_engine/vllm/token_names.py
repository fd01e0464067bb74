"""A middleware that names tokens: `--middleware instep_engine.vllm.token_names.Middleware`.

From 0.32 on, vLLM answers each log-prob of its token route with a `token_id`. Before, it had `"token": "token_id:7"`.
With it clients (such as the package `renderers`) check that a log-prob is that of their token. Requests with `logprobs`
of 1 or more get both.
"""

from __future__ import annotations

import json
from typing import Any

from instep_engine.asgi import GENERATE, App, Message, Receive, Send, body_of, with_body


class Middleware:
    """An ASGI middleware that adds the older name of a token to vLLM's answers with log-probs."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != GENERATE or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if (body := await body_of(receive)) is not None:
            sender = _Renaming(send).send if wants_names(body) else send
            await self.app(*with_body(body, scope, receive), sender)


class _Renaming:
    """Holds an answer back until it is complete, and sends it with names. A body that is not JSON passes unchanged."""

    def __init__(self, send: Send):
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                body = named(self._body)
                headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                await self._send({**self._start, "headers": headers})
                await self._send({"type": "http.response.body", "body": body})
        else:
            await self._send(message)


def _is_json(message: Message) -> bool:
    types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
    return message["status"] == 200 and any(value.startswith(b"application/json") for value in types)


def wants_names(body: bytes) -> bool:
    """Return whether a request wants log-probs of other tokens than the sampled ones, too, as such clients do."""
    try:
        asked = json.loads(body)["sampling_params"]["logprobs"]
    except (ValueError, KeyError, TypeError):  # vLLM reports what is wrong
        return False
    return type(asked) is int and asked >= 1


def named(body: bytes) -> bytes:
    """Return the JSON of an answer with a `token` in each log-prob. null, vLLM's answer to a lost client, is kept."""
    answer = json.loads(body)
    for choice in (answer or {}).get("choices") or ():
        entries: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
        for entry in entries:
            entry.setdefault("token", f"token_id:{entry.get('token_id')}")
    return json.dumps(answer, separators=(",", ":")).encode()

"""`POST /generate` in two forms (`sglang_form.py`, `vllm_form.py`), by vLLM's own route for tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from instep_engine import vllm_form
from instep_engine.asgi import GENERATE, App, Message, Receive, Send, body_of, reply, with_body
from instep_engine.sglang_form import HEADER, PATH

__all__ = ["PATH", "answer"]


async def answer(app: App, scope: Message, receive: Receive, send: Send) -> None:
    """Answer a request. vLLM's errors go on to the client."""
    if (body := await body_of(receive)) is None:
        return
    begun, tokenizer = time.monotonic(), scope["app"].state.engine_client.get_tokenizer()
    header = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), None)
    try:
        asked = vllm_form.read(json.loads(body), header)
        add = asked.adds_special_tokens
        ids = list(asked.ids or []) if asked.text is None else tokenizer.encode(asked.text, add_special_tokens=add)
        payload = json.dumps(asked.payload(ids)).encode()
    except (ValueError, TypeError) as error:
        refusal = {"message": str(error), "type": "BadRequestError", "code": 400}
        return await reply(send, 400, {"error": refusal})
    headers = [(name, value) for name, value in scope["headers"] if name != b"accept"]
    inner = {**scope, "path": GENERATE, "raw_path": GENERATE.encode(), "headers": headers}
    parts: list[Message] = []

    async def collect(message: Message) -> None:
        parts.append(message)

    await app(*with_body(payload, inner, receive), collect)
    status = next((part["status"] for part in parts if part["type"] == "http.response.start"), 500)
    found: Any = b"".join(part.get("body", b"") for part in parts if part["type"] == "http.response.body")
    if status == 200 and (found := json.loads(found)) is None:  # to a client that has gone, or at vLLM's end
        gone = {"message": "vLLM has ended this request", "type": "ServiceUnavailable", "code": 503}
        status, found = 503, {"error": gone}
    elif status == 200:

        async def decode(tokens: Sequence[int], skip: bool) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=skip))

        found = await vllm_form.reply_of(asked, ids, found, time.monotonic() - begun, decode)
    await reply(send, status, found)

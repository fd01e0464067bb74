"""`POST /generate` in two forms (`sglang_form.py`, `vllm_form.py`), by vLLM's own route for tokens."""

from __future__ import annotations

import json
import time
from typing import Any

from instep_engine import vllm_form
from instep_engine.sglang_form import HEADER, PATH, Asked
from instep_engine.vllm.asgi import GENERATE, App, Message, Receive, Send, body_of, reply, with_body

__all__ = ["PATH", "answer"]


async def answer(app: App, scope: Message, receive: Receive, send: Send) -> None:
    """Answer a request; what vLLM says to one that it refuses goes on to the client."""
    if (body := await body_of(receive)) is None:
        return
    begun, tokenizer = time.monotonic(), scope["app"].state.engine_client.get_tokenizer()
    header = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), None)
    try:
        given = json.loads(body)
        asked = (vllm_form.Asked if vllm_form.is_asked(given, header) else Asked).read(given, header)
        add = not isinstance(asked, Asked)  # slime's functions tokenize without special tokens
        ids = asked.ids if asked.text is None else tokenizer.encode(asked.text, add_special_tokens=add)
        payload = json.dumps(asked.payload(list(ids or []))).encode()
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
    if status == 200 and (found := json.loads(found)) is None:  # so vLLM answers one who has gone, also as it ends
        gone = {"message": "vLLM has ended this request", "type": "ServiceUnavailable", "code": 503}
        status, found = 503, {"error": gone}
    elif status == 200:
        skip, prompt = asked.skip_special_tokens, list(ids or [])
        if isinstance(asked, Asked):
            shown = tokenizer.decode(asked.shown(found), skip_special_tokens=skip)
            found = asked.reply(prompt, found, shown, time.monotonic() - begun)
        else:
            texts = [tokenizer.decode(tokens, skip_special_tokens=skip) for tokens in asked.shown(found)]
            said = tokenizer.decode(prompt) if asked.text is None else asked.text
            found = asked.reply(prompt, found, said, texts)
    await reply(send, status, found)

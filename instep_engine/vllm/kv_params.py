"""For prefill and decode engines of vLLM before 0.32: `--middleware instep_engine.vllm.kv_params.Middleware`.

Their token route answers with `kv_transfer_params`, but ignores those of a request. So the decode engine would silently
compute every prompt again. The core reads them from the sampling parameters' `extra_args`.
"""

from __future__ import annotations

import json

from instep_engine.asgi import GENERATE, App, Message, Receive, Send, body_of, with_body


class Middleware:
    """An ASGI middleware that moves a token request's `kv_transfer_params` to where the core reads them."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != GENERATE:
            await self.app(scope, receive, send)
            return
        if (body := await body_of(receive)) is not None:
            await self.app(*with_body(moved(body), scope, receive), send)


def moved(body: bytes) -> bytes:
    """Return the JSON of a request with its parameters moved; unchanged without them, or if vLLM will refuse it."""
    try:
        request = json.loads(body)
        params = request.pop("kv_transfer_params", None)
        sampling = request["sampling_params"]
        if params is None:
            return body
        sampling["extra_args"] = {**(sampling.get("extra_args") or {}), "kv_transfer_params": params}
    except (ValueError, KeyError, TypeError, AttributeError):
        return body
    return json.dumps(request).encode()

"""The middleware of the plugin that gives vLLM 0.26 the cache of another engine."""

import asyncio
import json

import pytest

from instep_engine.asgi import GENERATE
from instep_engine.vllm import kv_params


def passed_on(body, path="/inference/v1/generate", pieces=1):
    """What the server behind it gets of a request: headers, body, and what comes after."""
    got = []

    async def app(scope, receive, send):
        messages = [await receive() for _ in range(2 if path == GENERATE else pieces)]
        got.append((dict(scope["headers"]), messages))

    size = -(-len(body) // pieces)
    parts = [body[i * size : (i + 1) * size] for i in range(pieces)]
    sent = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    sent.append({"type": "http.disconnect"})

    async def receive():
        return sent.pop(0)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(kv_params.Middleware(app)(scope, receive, None))
    return got[0]


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_cache_goes_where_the_core_reads_it(pieces):
    request = {"token_ids": [1, 2], "sampling_params": {"seed": 1, "extra_args": {"a": 1}}}
    body = json.dumps(request | {"kv_transfer_params": {"do_remote_prefill": True}}).encode()
    headers, (message, after) = passed_on(body, pieces=pieces)
    request["sampling_params"]["extra_args"]["kv_transfer_params"] = {"do_remote_prefill": True}
    assert json.loads(message["body"]) == request and not message["more_body"]
    assert headers[b"content-length"] == str(len(message["body"])).encode() and len(headers) == 2
    assert after == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"", b'{"kv_transfer_params": {}}', b'{"sampling_params": {}}', b'{"sampling_params": 1}']
)
def test_what_has_none_goes_on_as_it_is(body):
    headers, (message, _) = passed_on(body)
    assert message["body"] == body and headers[b"content-length"] == str(len(body)).encode()


def test_other_routes_are_not_read():
    body = b'{"kv_transfer_params": {}, "sampling_params": {}}'
    _, messages = passed_on(body, path="/v1/completions", pieces=2)
    assert b"".join(message["body"] for message in messages) == body

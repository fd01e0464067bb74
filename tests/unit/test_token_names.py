"""The plugin's middleware that gives log-probs the names of their tokens, and `/generate`; they need no vLLM."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from instep_engine.vllm import sglang
from instep_engine.vllm.token_names import Middleware

CONTENT = [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5, "token": "token_id:9"}]
ANSWER = {"request_id": "r", "choices": [{"index": 0, "token_ids": [7, 9], "logprobs": {"content": CONTENT}}]}


def ask(
    sampling: Any, answer: bytes, content_type: bytes = b"application/json", status: int = 200
) -> tuple[Any, bytes]:
    """The headers and the body with which a request is answered, whose app answers in two pieces."""
    sent: list[Any] = []
    body = json.dumps({"token_ids": [1], "sampling_params": sampling}).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == body
        headers = [(b"content-type", content_type), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer[:20], "more_body": True})
        await send({"type": "http.response.body", "body": answer[20:]})

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/inference/v1/generate", "method": "POST", "headers": []}
    asyncio.run(Middleware(app)(scope, receive, send))
    return dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


def test_log_probs_get_the_names_of_their_tokens() -> None:
    headers, body = ask({"logprobs": 1}, json.dumps(ANSWER).encode())
    (choice,) = json.loads(body)["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:7", "token_id:9"]
    assert choice["token_ids"] == [7, 9] and headers[b"content-length"] == str(len(body)).encode()


@pytest.mark.parametrize(
    ("sampling", "content_type", "status"),
    [
        ({"logprobs": 0}, b"application/json", 200),
        ({}, b"application/json", 200),
        (None, b"application/json", 200),
        ({"logprobs": 1}, b"text/event-stream", 200),
        ({"logprobs": 1}, b"application/json", 400),
    ],
)
def test_other_answers_stay_as_they_are(sampling: Any, content_type: bytes, status: int) -> None:
    answer = json.dumps(ANSWER).encode()
    headers, body = ask(sampling, answer, content_type, status)
    assert body == answer and headers[b"content-type"] == content_type


def test_null_stays() -> None:
    """So vLLM answers one who has gone, also as it ends."""
    assert ask({"logprobs": 1}, b"null")[1] == b"null"


@pytest.mark.parametrize("body", [{"text": "a"}, {"prompt": "a"}])
def test_null_is_no_answer_to_generate(body: Any) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    engine = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=lambda text, **_: [1]))
    state = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "path": "/generate", "method": "POST", "headers": [], "app": state}
    asyncio.run(sglang.answer(app, scope, receive, send))
    assert sent[0]["status"] == 503 and "has ended this request" in sent[1]["body"].decode()

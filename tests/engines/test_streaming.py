"""Streams of the embedded engine say what the answer in one piece says."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engines.running import Engine
from tests.keys import HEADERS

MESSAGES = [{"role": "user", "content": "3 + 4 ="}]


@pytest.fixture
def embedded(engine: Engine) -> Engine:
    if engine.kind != "embedded":
        pytest.skip("vLLM's streams are its own")
    return engine


def connect(engine: Engine, route: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=60)
    connection.request("POST", route, json.dumps(body | {"stream": True}), HEADERS)
    return connection


def events(engine: Engine, route: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream, which ends with [DONE]."""
    connection = connect(engine, route, body)
    response = connection.getresponse()
    assert (response.status, response.headers.get_content_type()) == (200, "text/event-stream")
    lines = [line for line in response.read().decode().split("\n") if line]
    connection.close()
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """What the chunks of one choice say together."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert all(part["finish_reason"] is None for part in parts[:-1])
    ids = [token for part in parts for token in part["token_ids"]]
    out = {"token_ids": ids, "finish_reason": parts[-1]["finish_reason"], "stop_reason": parts[-1]["stop_reason"]}
    if "delta" in parts[0]:
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        content = [entry for part in parts for entry in part["logprobs"]["content"]]
        text = "".join(part["delta"]["content"] for part in parts)
        return out | {"message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}
    columns = {name: [x for part in parts for x in part["logprobs"][name]] for name in ("tokens", "token_logprobs")}
    return out | {"text": "".join(part["text"] for part in parts), "logprobs": columns}


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/completions", {"prompt": ["3 + 4 =", "1"], "logprobs": 0, "max_tokens": 40}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "max_tokens": 40}),
    ],
)
def test_a_stream_says_the_same(embedded: Engine, route: str, asked: dict[str, Any]) -> None:
    """With characters of several tokens, as the seed gives them."""
    body = asked | {"n": 3, "seed": 7, "return_token_ids": True}
    whole = embedded.ok(route, body)
    chunks = events(embedded, route, body | {"stream_options": {"include_usage": True}})
    *chunks, last = chunks
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert {chunk["object"] for chunk in chunks} == {
        "text_completion" if "prompt" in asked else "chat.completion.chunk"
    }
    assert len({chunk["id"] for chunk in chunks}) == 1 and len(chunks) > 3 * 20
    for choice in whole["choices"]:
        choice.pop("prompt_token_ids", None)
        assert joined(chunks, choice["index"]) | {"index": choice["index"]} == choice


def test_a_stop_string_is_not_sent_even_in_part(embedded: Engine) -> None:
    asked = {"prompt": "3 + 4 =", "max_tokens": 40, "seed": 7, "return_token_ids": True, "logprobs": 0}
    text = embedded.ok("/v1/completions", asked)["choices"][0]["text"]
    stop = next(text[i : i + 3] for i in range(8, 20) if text[i : i + 3].isascii())
    whole = embedded.ok("/v1/completions", asked | {"stop": stop})["choices"][0]
    streamed = joined(events(embedded, "/v1/completions", asked | {"stop": stop}), 0)
    assert streamed["text"] == whole["text"] == text[: text.index(stop)] and streamed["stop_reason"] == stop


def test_a_client_that_goes_away_ends_its_stream(embedded: Engine) -> None:
    body = {"prompt": "3", "max_tokens": 900, "ignore_eos": True, "n": 2}
    connection = connect(embedded, "/v1/completions", body)
    connection.getresponse().read(300)  # it has begun
    embedded.ok("/pause?mode=keep&clear_cache=false")  # so that it cannot end by itself
    assert not embedded.ok("/reset_prefix_cache")["success"]  # a request runs
    connection.close()
    deadline = time.monotonic() + 20
    while not embedded.ok("/reset_prefix_cache")["success"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_stream_cannot_do_is_refused(embedded: Engine) -> None:
    for more in (
        {"stream": 1},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "prompt_logprobs": 0},
    ):
        status, reply = embedded.call("/v1/completions", {"prompt": "1"} | more)
        assert status == 400 and "stream" in reply["error"]["message"], more


def test_a_refused_request_for_a_stream_is_a_plain_error(embedded: Engine) -> None:
    status, reply = embedded.call("/v1/completions", {"prompt": "1", "stream": True, "temperature": -1})
    assert status == 400 and "temperature" in reply["error"]["message"]


def test_an_abort_ends_a_stream_with_its_tokens(embedded: Engine) -> None:
    body = {"prompt": "3", "max_tokens": 900, "ignore_eos": True}
    connection = connect(embedded, "/v1/completions", body)
    response = connection.getresponse()
    first = response.read(100)
    embedded.ok("/abort_requests")
    chunks = (first + response.read()).decode().split("\n\n")
    connection.close()
    assert json.loads(chunks[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"

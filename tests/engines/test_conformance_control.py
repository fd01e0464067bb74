"""What the client relies on, whatever engine answers (design, section 4): pauses and aborts."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time

import pytest

from tests.bounds import allowed, until
from tests.engines.oracle import PROMPT, expected_log_probs, partial, returned_log_probs
from tests.engines.running import TOLERANCE, Engine
from tests.keys import HEADERS

# -- pauses and aborts


def test_pause_abort_returns_what_there_is(engine: Engine) -> None:
    choice = partial(engine, "/pause?mode=abort")
    assert choice["finish_reason"] == "abort" and choice.get("stop_reason") is None
    want = expected_log_probs(engine, choice)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < TOLERANCE
    if engine.capabilities.version_spans:
        (span,) = choice["weight_versions"]
        assert (span["start"], span["end"]) == (0, len(choice["token_ids"]))


def test_requests_wait_while_paused(engine: Engine) -> None:
    engine.ok("/pause")
    assert engine.ok("/is_paused", method="GET") == {"is_paused": True}
    future = engine.submit(PROMPT, max_tokens=3, ignore_eos=True)
    time.sleep(0.3)
    assert not future.done()
    engine.ok("/resume")
    assert len(future.result(timeout=20)["token_ids"]) == 3
    assert engine.ok("/is_paused", method="GET") == {"is_paused": False}


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_pause_keep_freezes_and_spans_are_exact(engine: Engine, clear_cache: str) -> None:
    """Version changes under the pause; the tokens are those of an uninterrupted run (weights are the same)."""
    spans, alone = engine.capabilities.version_spans, {"abort_all_requests": False} if engine.kind == "sglang" else {}
    if engine.kind == "sglang" and not spans:
        pytest.skip("SGLang from 0.5.19 on")
    before = engine.ok("/weight_info", method="GET")["weight_version"] if spans else ""
    free = engine.generate(PROMPT, ignore_eos=True, seed=4, max_tokens=300)["token_ids"]
    for wait in (0.2, 0.1, 0.4, 0.05, 1.0):
        future = engine.submit(PROMPT, ignore_eos=True, seed=4, max_tokens=300)
        time.sleep(wait)
        engine.ok(f"/pause?mode=keep&clear_cache={clear_cache}")
        frozen = not future.done()
        time.sleep(0.2)
        assert future.done() != frozen
        if spans:
            engine.ok("/update_weight_version", {"new_version": "next", **alone})
        engine.ok("/resume")
        choice = future.result(timeout=60)
        assert choice["token_ids"] == free
        if spans:
            engine.ok("/update_weight_version", {"new_version": before, **alone})
        if frozen and (not spans or len(choice["weight_versions"]) == 2):
            break
    assert frozen
    if spans:
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"]) == (before, "next")
        assert first["start"] == 0 and first["end"] == second["start"] > 0 and second["end"] == len(free)


def test_pause_wait_drains_and_holds_newcomers(engine: Engine) -> None:
    running = engine.submit(PROMPT, ignore_eos=True)
    until(lambda: running.done() or engine.at_work())
    pause = engine.pool.submit(engine.ok, "/pause?mode=wait")
    until(lambda: engine.ok("/is_paused", method="GET")["is_paused"])
    late = engine.submit(PROMPT, max_tokens=2, ignore_eos=True)
    pause.result(timeout=60)
    assert running.result(timeout=allowed(5))["finish_reason"] == "length"
    time.sleep(0.1)
    assert not late.done()
    engine.ok("/resume")
    assert len(late.result(timeout=20)["token_ids"]) == 2


def test_abort_by_id_ends_that_request_only(engine: Engine) -> None:
    engine.ok("/pause?mode=keep")
    bodies = [
        {"token_ids": PROMPT, "request_id": name, "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
        for name in ("one", "two")
    ]
    futures = [engine.pool.submit(engine.ok, "/inference/v1/generate", body) for body in bodies]

    def aborted_one() -> bool:  # asked again until it has come
        engine.ok("/abort_requests", {"request_ids": ["generate-tokens-one"]})
        return bool(concurrent.futures.wait([futures[0]], 0.2).done)

    until(aborted_one)
    aborted = futures[0].result()
    assert aborted["request_id"] == "generate-tokens-one"
    assert aborted["choices"][0]["finish_reason"] == "abort" and aborted["choices"][0]["token_ids"] == []
    assert not futures[1].done()
    engine.ok("/resume")
    assert futures[1].result(timeout=60)["choices"][0]["finish_reason"] == "length"


def test_abort_all(engine: Engine) -> None:
    choice = partial(engine, "/abort_requests")
    assert choice["finish_reason"] == "abort" and len(returned_log_probs(choice)) == len(choice["token_ids"])


def test_the_header_names_a_request(engine: Engine) -> None:
    body = {"token_ids": PROMPT, "request_id": "body", "sampling_params": {"max_tokens": 1}}
    reply = engine.ok("/inference/v1/generate", body, headers={"x-request-id": "header"})
    assert reply["request_id"] == "generate-tokens-header"


def test_a_client_that_leaves_is_forgotten(engine: Engine) -> None:
    engine.ok("/pause?mode=keep")
    host = engine.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("POST", "/inference/v1/generate", json.dumps({"token_ids": PROMPT}), HEADERS)
    time.sleep(allowed(0.3))
    connection.close()
    time.sleep(allowed(0.3))
    assert engine.ok("/abort_requests")["aborted"] == 0


def test_prefix_cache_reset(engine: Engine) -> None:
    assert engine.ok("/reset_prefix_cache")["success"] is True

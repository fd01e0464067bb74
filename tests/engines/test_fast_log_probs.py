"""vLLM's answers in arrays are its answers in JSON: tokens, log-probs, reasons and versions, also after an abort."""

from __future__ import annotations

import http.client
import importlib.util
import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from instep.engines.router import Router
from instep.engines.wire import FINAL_ONLY, GENERATE
from instep.rollout import runtime
from instep.rollout.client import complete
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from instep_engine.answers import CONTENT_TYPE, decode
from tests import keys
from tests.bounds import allowed
from tests.engines.running import TOLERANCE, Engine

pytestmark = pytest.mark.parametrize(
    "engine", [pytest.param(("vllm", "tied"), marks=pytest.mark.vllm, id="vllm-tied")], indirect=True
)
PROMPT = list(range(10, 40))
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
HELD_BACK = 32  # most tokens of a request that leave the engine core together


def request_of(engine: Engine, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", "Accept": f"{CONTENT_TYPE}, application/json", **keys.HEADERS}
    return urllib.request.Request(engine.url + GENERATE, json.dumps(body).encode(), headers)


def fast(engine: Engine, token_ids: list[int], **params: Any) -> list[dict[str, Any]]:
    """The choices of an answer in arrays."""
    params = {"output_kind": FINAL_ONLY, "logprobs": 0, "detokenize": False, **params}
    with urllib.request.urlopen(request_of(engine, {"token_ids": token_ids, "sampling_params": params})) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        choices: list[dict[str, Any]] = decode(answer.read())["choices"]
        return choices


def stock(engine: Engine, token_ids: list[int], **params: Any) -> list[dict[str, Any]]:
    """The choices of an answer in JSON, in the form of the others. `logprobs: 1` takes vLLM's own kernel for them."""
    choices = engine.choices(token_ids, **{"logprobs": 1, "detokenize": False, **params})
    for choice in choices:
        choice["log_probs"] = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choices


def gap(engine: Engine, got: list[dict[str, Any]], want: list[dict[str, Any]], versions: bool = True) -> float:
    """The largest gap of the log-probs of choices that are the same in all else."""
    assert len(got) == len(want)
    names = ["index", "token_ids", "finish_reason"] + ["weight_versions"] * versions
    names += ["stop_reason"] * engine.capabilities.stop_reasons  # 0.26 has it in arrays only
    gaps = [0.0]
    for one, other in zip(got, want, strict=True):
        assert {n: one.get(n) for n in names} == {n: other.get(n) for n in names}
        gaps += [abs(a - b) for a, b in zip(one["log_probs"], other["log_probs"], strict=True)]
    return max(gaps)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 1},
        {"max_tokens": 100, "ignore_eos": True},
        {"max_tokens": 64, "temperature": 0.0},
        {"max_tokens": 200, "temperature": 1.4, "n": 3},
        {"max_tokens": 90, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "temperature": 0.7, "ignore_eos": True},
        {"max_tokens": 90, "repetition_penalty": 1.2, "min_tokens": 50, "skip_special_tokens": True},
        {"max_tokens": 300, "stop_token_ids": list(range(100, 130)), "n": 2},
    ],
)
def test_arrays_say_what_json_says(engine: Engine, params: dict[str, Any]) -> None:
    assert gap(engine, fast(engine, PROMPT, seed=7, **params), stock(engine, PROMPT, seed=7, **params)) < TOLERANCE


def test_greedy_samples_are_alike(engine: Engine) -> None:
    """vLLM's own route refuses several."""
    (one,) = fast(engine, PROMPT, max_tokens=40, temperature=0.0)
    three = fast(engine, PROMPT, max_tokens=40, temperature=0.0, n=3)
    assert [choice["index"] for choice in three] == [0, 1, 2]
    assert [choice["token_ids"] for choice in three] == [one["token_ids"]] * 3


def test_the_client_takes_arrays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    url, bodies = keys.knowing(engine.url) + GENERATE, list[bytes]()
    monkeypatch.setattr("instep.rollout.http.decode", lambda body: [bodies.append(body), decode(body)][1])
    cases: list[tuple[dict[str, Any], bool]] = [({}, True), ({}, False), ({"stop": ["never"]}, True)]
    answers = [
        runtime.run(complete(url, "", PROMPT, {"max_tokens": 20, "seed": 1, **more}, arrays=arrays), timeout=60)
        for more, arrays in cases
    ]
    runtime.shutdown()
    assert answers[0] == answers[1] == answers[2] and len(bodies) == 1


@pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed")
def test_arrays_come_through_the_router(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It writes bodies anew, with fields that were not in them."""
    bodies = list[bytes]()
    monkeypatch.setattr("instep.rollout.http.decode", lambda body: [bodies.append(body), decode(body)][1])
    port = free_port()
    words = Router.command(["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())])
    url = keys.knowing(f"http://127.0.0.1:{port}")
    start = partial(SupervisedProcess, "router", [sys.executable, *words], tmp_path / "log.txt", keys.ENVIRONMENT)
    router, params = Router(url, lambda urls: start()), {"max_tokens": 20, "seed": 1, "n": 1}
    try:
        router.wait_ready(60)
        router.set_members([engine.url])
        answer = runtime.run(complete(url + GENERATE, "", PROMPT, params), timeout=60)
    finally:
        router.stop()
        runtime.shutdown()
    assert len(bodies) == 1 and answer.token_ids == decode(bodies[0])["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["a"], "detokenize": True},
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"structured_outputs": {"choice": ["a"]}, "detokenize": True},
        {"logit_bias": {"5": 1.0}},
        {"max_tokens": None},
    ],
)
def test_what_asks_for_more_gets_json(engine: Engine, more: dict[str, Any]) -> None:
    params = {"output_kind": FINAL_ONLY, "logprobs": 0, "detokenize": False, "max_tokens": 3, **more}
    params = {name: value for name, value in params.items() if value is not None}
    with urllib.request.urlopen(request_of(engine, {"token_ids": PROMPT, "sampling_params": params})) as answer:
        assert answer.headers["Content-Type"].startswith("application/json")
        assert json.loads(answer.read())["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": PROMPT * 100, "sampling_params": {"max_tokens": 5, "logprobs": 0, "detokenize": False}},
        {"token_ids": [10**6], "sampling_params": {"max_tokens": 5, "logprobs": 0, "detokenize": False}},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0, "logprobs": 0, "detokenize": False}},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "top_p": 7, "logprobs": 0, "detokenize": False}},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "n": 20_000, "logprobs": 0, "detokenize": False}},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "n": 0, "logprobs": 0, "detokenize": False}},
        {"token_ids": PROMPT, "model": "no", "sampling_params": {"max_tokens": 5, "logprobs": 0, "detokenize": False}},
    ],
)
def test_refusals_are_those_of_vllm(engine: Engine, body: dict[str, Any]) -> None:
    status, refusal = engine.call(GENERATE, body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request_of(engine, body))
    said = json.loads(caught.value.read())
    assert status >= 400 and (caught.value.code, said["error"]["message"]) == (status, refusal["error"]["message"])


def test_a_batch_may_mix_both(engine: Engine) -> None:
    numbers = random.Random(0)
    jobs = [
        (
            [numbers.randrange(3, 250) for _ in range(numbers.choice([5, 16, 33, 100]))],
            {"max_tokens": numbers.choice([1, 2, 16, 31, 32, 33, 64, 100]), "seed": i, "temperature": 1.0},
        )
        for i in range(24)
    ]
    for job in jobs[::3]:
        job[1]["ignore_eos"] = True
    for job in jobs[1::5]:
        job[1]["stop_token_ids"] = list(range(50, 90))
    asked: list[Future[list[dict[str, Any]]]] = []
    for i, (prompt, params) in enumerate(jobs):
        asked.append(engine.pool.submit(stock if i % 4 == 3 else fast, engine, prompt, **params))
        if i % 6 == 5:
            asked.append(engine.pool.submit(engine.choices, prompt, **{**params, "logprobs": 3}))
    together = [done.result(timeout=120) for done in asked]
    together = [choices for choices in together if "log_probs" in choices[0]]
    for (prompt, params), got in zip(jobs, together, strict=True):
        assert gap(engine, got, stock(engine, prompt, **params)) < TOLERANCE


def running(engine: Engine, wait: float, *, num_fast: int = 8) -> tuple[list[Future[Any]], Future[Any]]:
    """Fast requests with one prompt and one of vLLM's own beside them, after `wait` seconds."""
    engine.ok("/pause?mode=keep")  # so that all begin in one step
    asked = [engine.pool.submit(fast, engine, PROMPT, **LONG, seed=i) for i in range(num_fast)]
    own = engine.pool.submit(stock, engine, PROMPT, **LONG, seed=0)
    time.sleep(allowed(1.0))
    engine.ok("/resume")
    time.sleep(wait)
    return asked, own


def test_a_pause_lets_out_what_is_held_back(engine: Engine) -> None:
    """The spans of fast requests end where those of vLLM's own in the same batch do."""
    if not engine.capabilities.version_spans:
        pytest.skip("this vLLM does not say which weights made a token")
    before = engine.ok("/weight_info", method="GET")["weight_version"]
    for wait in (0.5, 0.2, 1.0, 0.1, 2.0):  # until the pause falls midway
        asked, own = running(engine, wait)
        engine.ok("/pause?mode=keep&clear_cache=false")
        engine.ok("/update_weight_version", {"new_version": "next"})
        engine.ok("/resume")
        (theirs,) = own.result(timeout=120)
        choices = [done.result(timeout=120)[0] for done in asked]
        engine.ok("/update_weight_version", {"new_version": before})
        if all(len(choice["weight_versions"]) == 2 for choice in [theirs, *choices]):
            break
    want = theirs["weight_versions"][0]["end"]
    for choice in choices:
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"], second["end"]) == (before, "next", len(choice["token_ids"]))
        assert abs(first["end"] - want) <= 4  # they did not begin in the same step
    assert choices[0]["token_ids"] == theirs["token_ids"]


@pytest.mark.parametrize(("route", "most_lost"), [("/pause?mode=abort", 4), ("/abort_requests", HELD_BACK + 4)])
def test_an_abort_returns_a_beginning(engine: Engine, route: str, most_lost: int) -> None:
    whole = [fast(engine, PROMPT, **LONG, seed=i)[0] for i in range(2)]
    for wait in (0.5, 0.2, 1.0, 0.1):
        asked, own = running(engine, wait)
        engine.ok(route)
        choices = [done.result(timeout=60)[0] for done in asked]
        (theirs,) = own.result(timeout=60)
        engine.ok("/resume")
        if all(choice["finish_reason"] == "abort" for choice in [theirs, *choices]):
            break
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    for choice, entire in zip(choices[:2], whole, strict=True):
        n = len(choice["token_ids"])
        assert choice["token_ids"] == entire["token_ids"][:n]
        beginning = {**entire, **{name: entire[name][:n] for name in ("token_ids", "log_probs")}}
        assert gap(engine, [{**choice, "finish_reason": "length"}], [beginning], versions=False) < TOLERANCE
    assert min(len(choice["token_ids"]) for choice in choices) >= len(theirs["token_ids"]) - most_lost


@pytest.mark.parametrize("route", ["/pause?mode=abort", "/abort_requests"])
def test_an_abort_ends_all_samples_of_a_group(engine: Engine, route: str) -> None:
    whole = fast(engine, PROMPT, **LONG, seed=3, n=3)
    asked = engine.pool.submit(fast, engine, PROMPT, **LONG, seed=3, n=3)
    time.sleep(0.3)
    engine.ok(route)
    choices = asked.result(timeout=60)
    engine.ok("/resume")
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3
    for choice, entire in zip(choices, whole, strict=True):
        assert choice["token_ids"] == entire["token_ids"][: len(choice["token_ids"])]


def test_a_client_that_leaves_is_forgotten(engine: Engine) -> None:
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=30)
    params = {**LONG, "logprobs": 0, "detokenize": False, "n": 4}
    body = json.dumps({"token_ids": PROMPT, "sampling_params": params})
    headers = {"Content-Type": "application/json", "Accept": CONTENT_TYPE, **keys.HEADERS}
    connection.request("POST", GENERATE, body, headers)
    deadline = time.monotonic() + 30
    while num_running(engine) != 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    connection.close()
    while num_running(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_running(engine: Engine) -> int:
    return metric(engine, "vllm:num_requests_running{")


def metric(engine: Engine, begins: str) -> int:
    request = urllib.request.Request(engine.url + "/metrics", headers=keys.HEADERS)
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(begins))

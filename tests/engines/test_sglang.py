"""What only SGLang has: its own `/generate`, its bad input, its keys; and what instep's plugin adds to it."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.engines.sglang import SglangKind, _numbers
from instep.engines.sglang_wire import SGLANG_WIRE, to_sglang
from instep.engines.wire import GenerationRequest
from instep.errors import ConfigError, EngineError
from instep_engine.sglang.sampling import murmur_hash32
from tests.bounds import until
from tests.engines.oracle import PROMPT, oracle
from tests.engines.running import MAX_MODEL_LEN, TOLERANCE, Engine
from tests.keys import HEADERS

on_sglang = [
    pytest.mark.sglang,
    pytest.mark.parametrize("engine", [pytest.param(("sglang", "tied"), id="sglang-tied")], indirect=True),
]


def real(function: Any) -> Any:
    for mark in on_sglang:
        function = mark(function)
    return function


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole words, as its author's reference has it."""
    h, mask = 0, 0xFFFFFFFF
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_noise_of_seeds_is_murmurhash3() -> None:
    seeds, positions, columns = [0, 7, 2**40 + 3, 2**62], [0, 5, 99, 1], torch.arange(6)
    got = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), columns)
    for row, seed, position in zip(got.tolist(), seeds, positions, strict=True):
        words = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        assert row == [murmur3(words + column.to_bytes(4, "little")) for column in range(6)]


def test_names_of_sampling_parameters() -> None:
    given = {"max_tokens": 5, "seed": 3, "top_k": -1, "stop": ["x"], "extra_args": {"a": 1}, "logprobs": 0}
    want = {"max_new_tokens": 5, "sampling_seed": 3, "top_k": -1, "stop": ["x"], "custom_params": {"a": 1}}
    assert to_sglang(given, "u") == {**want, "no_stop_trim": True}
    assert to_sglang({"structured_outputs": {"json": "{}"}}, "u")["json_schema"] == "{}"
    assert to_sglang({}, "u")["max_new_tokens"] is None  # SGLang's default is 128 tokens
    for bad, words in (
        ({"bad_words": ["x"]}, "no sampling parameter 'bad_words'"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"ignore_eos": True, "stop_token_ids": [3]}, "stop_token_ids if ignore_eos"),
        ({"min_tokens": 2, "stop": "x"}, "before min_tokens"),
    ):
        with pytest.raises(EngineError, match=words):
            to_sglang(bad, "u")


def test_answers_of_another_form_are_refused() -> None:
    tokens = [5, 6, 7]
    meta: dict[str, Any] = {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]}
    assert SGLANG_WIRE.prompt_log_probs({"meta_info": meta}, tokens, "u") == [-1.0, -2.0]
    for bad in ({}, {"meta_info": {}}, {"meta_info": {"input_token_logprobs": meta["input_token_logprobs"][:2]}}):
        with pytest.raises(EngineError, match="no log-probs of the tokens that were sent"):
            SGLANG_WIRE.prompt_log_probs(bad, tokens, "u")
    meta["input_token_logprobs"][2][1] = 8
    with pytest.raises(EngineError, match="or of other tokens"):
        SGLANG_WIRE.prompt_log_probs({"meta_info": meta}, tokens, "u")


def test_routed_experts_of_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 2}')
    rows, meta = (
        np.arange(18, dtype=np.int32).reshape(3, 3, 2),
        {"weight_version": "1", "finish_reason": {"type": "stop"}},
    )
    meta |= {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]}
    asked = []

    async def send(payload: dict[str, Any]) -> tuple[dict[str, Any], None]:
        asked.append(payload)
        experts = {"routed_experts": base64.b64encode(rows.tobytes()).decode()}
        return {"output_ids": [7, 8], "meta_info": meta | experts}, None

    params = {"routed_experts_prompt_start": 2, "max_tokens": 2}
    request = GenerationRequest("u", str(tmp_path), [1, 2, 3, 4], params)
    (made,) = asyncio.run(SGLANG_WIRE.complete_n(request, 1, send))
    assert made.routed_experts is not None and (made.routed_experts == rows).all()
    assert asked[0]["return_routed_experts"] is True and asked[0]["routed_experts_start_len"] == 2
    assert asked[0]["sampling_params"] == {"max_new_tokens": 2, "no_stop_trim": True}
    rows = rows[:2, :1]
    with pytest.raises(EngineError, match="a response of another form"):
        asyncio.run(SGLANG_WIRE.complete_n(request, 1, send))


def test_versions() -> None:
    assert [_numbers(v) for v in ("0.5.17", "0.5.15.post1", "0.6.2rc1")] == [(0, 5, 17), (0, 5, 15), (0, 6, 2)]
    assert not SglangKind("0.5.17").capabilities.version_spans and SglangKind("0.5.23").capabilities.version_spans
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.16 lacks the hooks"):
        _ = SglangKind("0.5.16").capabilities
    with pytest.raises(ConfigError, match="would have unknown versions"):
        SglangKind("0.5.17").capabilities.check_pause("keep", arrays=False)


# ---- its own route


@real
def test_slimes_form_reaches_it_unchanged(engine: Engine) -> None:
    """As slime's functions send it."""
    params = {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 20, "sampling_seed": 4, "ignore_eos": True},
        **{"stop": None, "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True},
        "spaces_between_special_tokens": False,
    }
    reply = engine.ok("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 20} and meta["prompt_tokens"] == len(PROMPT)
    ids = [entry[1] for entry in meta["output_token_logprobs"]]
    assert ids == reply["output_ids"] and isinstance(reply["text"], str)
    want = oracle(engine, PROMPT + ids).log_softmax(-1)
    for i, (p, token, _) in enumerate(meta["output_token_logprobs"], len(PROMPT)):
        assert p == pytest.approx(float(want[i - 1, token]), abs=TOLERANCE)
    assert ids == engine.generate(PROMPT, max_tokens=20, seed=4, ignore_eos=True)["token_ids"]


@real
def test_n_responses_have_seeds_of_their_own(engine: Engine) -> None:
    params = {"max_new_tokens": 12, "sampling_seed": 9, "ignore_eos": True, "n": 4}
    many = engine.ok("/generate", {"input_ids": PROMPT, "sampling_params": params})
    one = [engine.generate(PROMPT, max_tokens=12, seed=9 + i, ignore_eos=True)["token_ids"] for i in range(4)]
    assert [reply["output_ids"] for reply in many] == one and len({tuple(ids) for ids in one}) == 4
    without = engine.ok("/generate", {"input_ids": PROMPT, "sampling_params": {**params, "sampling_seed": None}})
    assert len({tuple(reply["output_ids"]) for reply in without}) == 4


@real
def test_min_p_keeps_the_likely_tokens(engine: Engine) -> None:
    probs = oracle(engine, PROMPT)[-1].softmax(-1)
    kept = set((probs >= 0.2 * probs.max()).nonzero()[:, 0].tolist())
    found = {c["token_ids"][0] for c in engine.choices(PROMPT, max_tokens=1, n=64, seed=5, min_p=0.2)}
    assert len(found) > 1 and found <= kept


@real
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [], "sampling_params": {}}, "input_ids empty"),
        ({"sampling_params": {}}, "input_ids"),
        ({"input_ids": [100_000], "sampling_params": {}}, "vocabulary"),
        ({"input_ids": [-1], "sampling_params": {}}, "vocabulary"),
        ({"input_ids": [5] * MAX_MODEL_LEN, "sampling_params": {}}, str(MAX_MODEL_LEN)),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "custom_labels": {"instep": '{"routed_experts_start_len": "x"}'}}, "integer"),
        ({"input_ids": [5], "custom_labels": {"instep": '{"no_such": 1}'}}, "no_such"),
    ],
)
def test_bad_requests_get_a_named_400_and_the_server_lives(engine: Engine, body: Any, words: str) -> None:
    status, reply = engine.call("/generate", body)
    assert status == 400 and any(word in json.dumps(reply) for word in words.split()), reply
    assert engine.generate(PROMPT, max_tokens=1)["token_ids"]


@real
def test_a_client_that_leaves_is_forgotten(engine: Engine) -> None:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=10)
    engine.ok("/pause")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    connection.request("POST", "/generate", json.dumps(body), {**HEADERS, "Content-Type": "application/json"})
    time.sleep(0.3)
    connection.close()
    engine.ok("/resume")
    until(lambda: engine.ok("/abort_requests")["aborted"] == 0)
    assert engine.ok("/reset_prefix_cache") == {"success": True}  # no request uses it


@real
def test_control_needs_the_key(engine: Engine) -> None:
    for route in ("/pause", "/start_weight_update", "/update_weights_from_tensor", "/generate"):
        status, reply = engine.call(route, {}, headers={"Authorization": "Bearer wrong"})
        assert status == 401 and "needs a key" in reply["error"]["message"]
    assert engine.ok("/instep/alive", method="GET") == {"alive": True}


@real
def test_openais_routes(engine: Engine) -> None:
    (model,) = engine.ok("/v1/models", method="GET")["data"]
    body = {"model": model["id"], "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    completion = engine.ok("/v1/completions", body)
    assert completion["usage"]["completion_tokens"] == 6
    chat = {"model": model["id"], "messages": [{"role": "user", "content": "3 + 4"}], "max_tokens": 4}
    assert engine.ok("/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"


# ---- its sessions


@real
def test_a_session_is_one_at_a_time_and_in_order(engine: Engine, tmp_path: Path) -> None:
    control = engine.control()
    for call, words in (
        (lambda: control.update({"backend": "disk", "path": str(tmp_path)}, timeout=30), "no session was announced"),
        (lambda: control.kind.start_update(control, "3", "n", timeout=30), ""),
        (lambda: engine_finish(engine, "4"), "no session of version 4"),
        (lambda: engine_finish(engine, "3"), ""),
        (lambda: engine_finish(engine, "3"), "no session of version 3"),
    ):
        if words:
            with pytest.raises(EngineError, match=words):
                call()
        else:
            call()
    status, reply = engine.call("/start_weight_update", {"protocol": 1, "version": "3", "nonce": "n"})
    assert status == 400 and "speaks protocol 1" in reply["error"]["message"]


@real
def test_it_sleeps_and_wakes_in_stages(engine: Engine) -> None:
    """On a CPU nothing is freed, but each tag must be released before it is resumed, or the server dies."""
    before = engine.generate(PROMPT, max_tokens=8, seed=1)["token_ids"]
    engine.ok("/pause")
    for level, tags in ((2, ("weights", "kv_cache")), (1, ("kv_cache", "weights"))):
        engine.ok(f"/sleep?level={level}")
        engine.ok(f"/sleep?level={level}")  # again: nothing is left to free
        for tag in (*tags, *tags):
            engine.ok(f"/wake_up?tags={tag}")
    engine.ok("/resume")
    assert engine.generate(PROMPT, max_tokens=8, seed=1)["token_ids"] == before


def engine_finish(engine: Engine, version: str) -> None:
    engine.control().post("/finish_weight_update", {"weight_version": version}, timeout=30)


@pytest.fixture(autouse=True)
def _resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").ok("/resume")

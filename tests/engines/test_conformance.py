"""What instep's client relies on, whatever engine answers (design, section 4)."""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from instep.engines.embedded.sampling import uniforms
from tests.engines.conftest import (
    MAX_MODEL_LEN,
    Engine,
    engine_command,
    engine_environment,
    make_checkpoint,
    run_engine,
)

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
EOS = 1


def oracle(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Float32 logits `[len(tokens), vocab]` of a plain forward pass."""
    with torch.no_grad():
        return engine.hf(torch.tensor([tokens])).logits[0].float()


def expected_log_probs(engine: Engine, choice: dict[str, Any], temperature: float = 1.0) -> list[float]:
    tokens = PROMPT + choice["token_ids"]
    log_probs = (oracle(engine, tokens) / temperature).log_softmax(-1)
    return [float(log_probs[i - 1, tokens[i]]) for i in range(len(PROMPT), len(tokens))]


def returned_log_probs(choice: dict[str, Any]) -> list[float]:
    content = choice["logprobs"]["content"]
    assert [c["token_id"] for c in content] == choice["token_ids"]
    return [c["logprob"] for c in content]


def partial(engine: Engine, end: str, **params: Any) -> dict[str, Any]:
    """A long response that the route `end` interrupted midway; tried again if the machine was too quick or too slow."""
    for wait in (0.2, 0.1, 0.4, 0.05, 1.0):
        future = engine.submit(PROMPT, ignore_eos=True, logprobs=0, **params)
        time.sleep(wait)
        engine.ok(end)
        choice = future.result(timeout=60)
        if 0 < len(choice["token_ids"]) < MAX_MODEL_LEN - len(PROMPT):
            return choice
        engine.ok("/resume")
    raise AssertionError("never interrupted midway")


# -- log-probs


def test_prompt_log_probs_equal_a_plain_forward(engine: Engine) -> None:
    tokens = [(7 * i * i + 3) % 290 + 3 for i in range(60)]
    want = oracle(engine, tokens).log_softmax(-1)
    got = engine.prompt_log_probs(tokens)
    assert len(got) == 59
    assert max(abs(got[i] - float(want[i, tokens[i + 1]])) for i in range(59)) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_sampled_log_probs_are_those_at_the_sampling_temperature(engine: Engine, temperature: float) -> None:
    choice = engine.generate(PROMPT, max_tokens=80, temperature=temperature, logprobs=0, seed=5, ignore_eos=True)
    want = expected_log_probs(engine, choice, temperature)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < 1e-5


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one(engine: Engine) -> None:
    choice = engine.generate(PROMPT, max_tokens=40, temperature=0, logprobs=0, ignore_eos=True)
    tokens = PROMPT + choice["token_ids"]
    assert choice["token_ids"] == oracle(engine, tokens).argmax(-1)[len(PROMPT) - 1 : -1].tolist()
    want = expected_log_probs(engine, choice)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < 1e-5


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.5}])
def test_truncated_sampling_is_renormalised(engine: Engine, limits: dict[str, float]) -> None:
    """Against a scalar oracle; tokens outside the kept set never appear."""
    choice = engine.generate(PROMPT, max_tokens=60, temperature=0.8, logprobs=0, ignore_eos=True, seed=3, **limits)
    tokens = PROMPT + choice["token_ids"]
    probs = (oracle(engine, tokens) / 0.8).double().softmax(-1).tolist()
    for i, got in enumerate(returned_log_probs(choice), len(PROMPT)):
        row = sorted(enumerate(probs[i - 1]), key=lambda x: -x[1])
        row = row[: int(limits.get("top_k", 300))]
        total, kept, before = sum(p for _, p in row), {}, 0.0
        for token, p in row:
            if before < limits.get("top_p", 1.0):
                kept[token] = p
            before += p / total
        assert tokens[i] in kept
        assert got == pytest.approx(math.log(kept[tokens[i]] / sum(kept.values())), abs=1e-4)


def test_tokens_follow_the_distribution(engine: Engine) -> None:
    """First tokens of 1024 seeds against the model's probabilities: chi-squared over the likely tokens."""
    probs = oracle(engine, PROMPT)[-1].softmax(-1)
    counts = torch.zeros_like(probs)
    for start in range(0, 1024, 64):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "n": 64, "seed": 1000 + start}}
        for choice in engine.ok("/inference/v1/generate", body)["choices"]:
            counts[choice["token_ids"][0]] += 1
    likely = probs * 1024 > 5
    want, got = probs[likely] * 1024, counts[likely]
    degrees = int(likely.sum())
    assert float(((got - want) ** 2 / want).sum()) < degrees + 5 * math.sqrt(2 * degrees)


# -- where a response ends


def test_eos_is_kept_and_default_length_fills_the_context(engine: Engine) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"n": 32, "seed": 1, "temperature": 1.5}}
    reply = engine.ok("/inference/v1/generate", body)
    stopped = [c for c in reply["choices"] if c["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        assert choice["token_ids"].index(EOS) == len(choice["token_ids"]) - 1
        assert choice["stop_reason"] is None
    for choice in reply["choices"]:
        if choice["finish_reason"] == "length":
            assert len(choice["token_ids"]) == MAX_MODEL_LEN - len(PROMPT) and EOS not in choice["token_ids"]


def test_ignore_eos_runs_to_the_end_of_the_context(engine: Engine) -> None:
    choice = engine.generate(PROMPT, ignore_eos=True, temperature=1.5, seed=1)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == MAX_MODEL_LEN - len(PROMPT)


def test_max_tokens_beyond_the_context_is_capped(engine: Engine) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 3)
    choice = engine.generate(prompt, max_tokens=50, ignore_eos=True)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3


def test_stop_token_ids(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)["token_ids"]
    choice = engine.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[free[4]])
    assert choice["token_ids"] == free[: free.index(free[4]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", free[4])


def test_stop_strings_stay_in_the_tokens_and_leave_the_text(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    params = {"max_tokens": 60, "ignore_eos": True, "seed": 11}
    free = engine.generate(PROMPT, **params)["token_ids"]
    stop = next(s for i in range(20, 55) if "\ufffd" not in (s := tokenizer.decode(free[i : i + 3])) and len(s) > 2)
    choice = engine.generate(PROMPT, stop=[stop, "never to be seen"], **params)
    kept = choice["token_ids"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert kept == free[: len(kept)] and stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])
    body = {"prompt": PROMPT, "stop": stop, "return_token_ids": True, **params}
    completion = engine.ok("/v1/completions", body)["choices"][0]
    assert completion["token_ids"] == kept
    assert completion["text"] == tokenizer.decode(kept, skip_special_tokens=True).split(stop)[0]


def test_min_tokens(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_tokens=1, temperature=0)["token_ids"]
    stops = [free[0], EOS]
    choice = engine.generate(PROMPT, max_tokens=40, temperature=0, min_tokens=6, stop_token_ids=stops, logprobs=0)
    assert len(choice["token_ids"]) >= 6 and not set(choice["token_ids"][:6]) & set(stops)
    row = oracle(engine, PROMPT)[-1]
    row[stops] = -torch.inf
    assert returned_log_probs(choice)[0] == pytest.approx(float(row.log_softmax(-1).max()), abs=1e-5)


# -- many at once


def test_n_responses_of_one_prompt(engine: Engine) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"n": 6, "max_tokens": 20, "seed": 9}, "return_token_ids": True}
    first, second = (engine.ok("/inference/v1/generate", body) for _ in range(2))
    tokens = [c["token_ids"] for c in first["choices"]]
    assert [c["index"] for c in first["choices"]] == list(range(6)) and len(set(map(tuple, tokens))) == 6
    assert tokens == [c["token_ids"] for c in second["choices"]]
    assert first["prompt_token_ids"] == PROMPT
    alone = [engine.generate(PROMPT, max_tokens=20, seed=9 + i)["token_ids"] for i in range(6)]
    assert tokens == alone  # what the client relies on when it asks for a group at once


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    prompts = [[40 + i, *PROMPT[: 1 + i % 5]] for i in range(16)]
    params = [{"max_tokens": 20 + 5 * i, "temperature": 0.7 + 0.05 * i, "seed": 100 + i} for i in range(16)]
    params[3] |= {"top_k": 7}
    params[5] |= {"temperature": 0}
    alone = [engine.generate(p, ignore_eos=True, **kw)["token_ids"] for p, kw in zip(prompts, params, strict=True)]
    futures = [engine.submit(p, ignore_eos=True, **kw) for p, kw in zip(prompts, params, strict=True)]
    together = [f.result(timeout=60)["token_ids"] for f in futures]
    assert together == alone
    assert [len(t) for t in alone] == [20 + 5 * i for i in range(16)]


def test_batch_invariant_bits_do_not_depend_on_the_batch(engine: Engine, tmp_path: Path) -> None:
    """Log-probs to the last bit, whatever shares the batch and in whatever order it came: what exact resume needs."""
    if engine.kind != "embedded":
        pytest.skip("a mode of the embedded engine")
    prompts = [[40 + i % 5, *PROMPT[: 1 + i % 5]] for i in range(24)]
    params = [{"max_tokens": 10 + 3 * i, "seed": i, "logprobs": 0, "ignore_eos": True} for i in range(24)]
    options = ("--batch-invariant", "--max-num-seqs", "16")
    with run_engine(engine.kind, engine.path, engine.hf, tmp_path / "log", *options) as fixed:
        alone = [fixed.generate(p, **kw) for p, kw in zip(prompts, params, strict=True)]
        for order in (range(24), range(23, -1, -1)):
            futures = {i: fixed.submit(prompts[i], **params[i]) for i in order}
            assert [futures[i].result(timeout=60) for i in range(24)] == alone


def test_without_a_seed_responses_differ(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_tokens=20)["token_ids"] != engine.generate(PROMPT, max_tokens=20)["token_ids"]


def test_more_requests_than_slots(engine: Engine) -> None:
    body = {"prompt": [[50 + i] for i in range(5)], "n": 30, "max_tokens": 4, "ignore_eos": True, "seed": 2}
    reply = engine.ok("/v1/completions", body | {"return_token_ids": True})
    choices = reply["choices"]
    assert [c["index"] for c in choices] == list(range(150))
    assert [c["prompt_token_ids"] for c in choices] == [[50 + i] for i in range(5) for _ in range(30)]
    assert all(len(c["token_ids"]) == 4 for c in choices)


# -- pauses and aborts


def test_pause_abort_returns_what_there_is(engine: Engine) -> None:
    choice = partial(engine, "/pause?mode=abort")
    assert choice["finish_reason"] == "abort" and choice["stop_reason"] is None
    want = expected_log_probs(engine, choice)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < 1e-5
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
    before = engine.ok("/weight_info", method="GET")["weight_version"]
    free = engine.generate(PROMPT, ignore_eos=True, seed=4, max_tokens=500)["token_ids"]
    for wait in (0.2, 0.1, 0.4, 0.05, 1.0):
        future = engine.submit(PROMPT, ignore_eos=True, seed=4, max_tokens=500)
        time.sleep(wait)
        engine.ok(f"/pause?mode=keep&clear_cache={clear_cache}")
        frozen = not future.done()
        time.sleep(0.2)
        assert future.done() != frozen
        engine.ok("/update_weight_version", {"new_version": "next"})
        engine.ok("/resume")
        choice = future.result(timeout=60)
        engine.ok("/update_weight_version", {"new_version": before})
        if len(choice["weight_versions"]) == 2:
            break
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == (before, "next")
    assert first["start"] == 0 and first["end"] == second["start"] > 0 and second["end"] == len(free)
    assert choice["token_ids"] == free


def test_pause_wait_drains_and_holds_newcomers(engine: Engine) -> None:
    running = engine.submit(PROMPT, ignore_eos=True)
    time.sleep(0.1)
    pause = engine.pool.submit(engine.ok, "/pause?mode=wait")
    time.sleep(0.1)
    late = engine.submit(PROMPT, max_tokens=2, ignore_eos=True)
    pause.result(timeout=60)
    assert running.result(timeout=1)["finish_reason"] == "length"
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
    time.sleep(0.3)
    engine.ok("/abort_requests", {"request_ids": ["generate-tokens-one"]})
    aborted = futures[0].result(timeout=10)
    assert aborted["request_id"] == "generate-tokens-one"
    assert aborted["choices"][0]["finish_reason"] == "abort" and aborted["choices"][0]["token_ids"] == []
    assert not futures[1].done()
    engine.ok("/resume")
    assert futures[1].result(timeout=10)["choices"][0]["finish_reason"] == "length"


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
    connection.request("POST", "/inference/v1/generate", json.dumps({"token_ids": PROMPT}))
    time.sleep(0.3)
    connection.close()
    time.sleep(0.3)
    assert engine.ok("/abort_requests")["aborted"] == 0


def test_prefix_cache_reset(engine: Engine) -> None:
    assert engine.ok("/reset_prefix_cache")["success"] is True


# -- bad input


@pytest.mark.parametrize(
    ("body", "words"),  # of which the message has one: engines word it in their own way
    [
        ({"token_ids": [], "sampling_params": {}}, "prompt token_ids"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": "text", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1, 2.5], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [5] * MAX_MODEL_LEN, "sampling_params": {}}, str(MAX_MODEL_LEN)),
        ({"token_ids": [100000], "sampling_params": {}}, "vocabulary"),
        ({"token_ids": [-1], "sampling_params": {}}, "vocabulary token_ids"),
        ({"token_ids": [5], "sampling_parms": {}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"token_ids": [5], "sampling_params": {"min_tokens": 5, "max_tokens": 2}}, "min_tokens"),
        ({"token_ids": [5], "sampling_params": {"stop": [3]}}, "stop"),
        ({"token_ids": [5], "sampling_params": {"stop": ["x"], "detokenize": False}}, "detokenize"),
        ({"token_ids": [5], "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids"),
        ({"token_ids": [5], "sampling_params": 3}, "sampling"),
        (b"{", "JSON"),
        (b"[]", "JSON dictionary"),
    ],
)
def test_bad_requests_get_a_named_400(engine: Engine, body: Any, words: str) -> None:
    status, reply = engine.call("/inference/v1/generate", body)
    assert status == 400 and any(word in reply["error"]["message"] for word in words.split()), reply


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"token_ids": [5], "stream": True}, "stream"),
        ({"token_ids": [5], "sampling_params": {"max_token": 3}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": "3"}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"logprobs": 2}}, "logprobs"),
        ({"token_ids": [5], "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
    ],
)
def test_what_it_cannot_do_or_does_not_know_is_refused(engine: Engine, body: Any, word: str) -> None:
    if not engine.capabilities.strict_requests:
        pytest.skip("vLLM does more, and passes over names that it does not know; the client checks them (`to_vllm`)")
    status, reply = engine.call("/inference/v1/generate", body)
    assert status == 400 and word in reply["error"]["message"], reply


def test_neutral_parameters_of_vllm_are_taken(engine: Engine) -> None:
    params = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "top_k": -1, "stop": None, "logprobs": None}
    reply = engine.ok(
        "/inference/v1/generate", {"token_ids": [5], "stream": False, "sampling_params": params | {"max_tokens": 1}}
    )
    assert reply["choices"][0]["logprobs"] is None


def test_another_model_is_404(engine: Engine) -> None:
    generate = {"token_ids": [5], "sampling_params": {}}
    for route, prompt in (("/inference/v1/generate", generate), ("/v1/completions", {"prompt": [5]})):
        status, reply = engine.call(route, {"model": "another", **prompt})
        assert status == 404 and "another" in reply["error"]["message"]
    assert engine.call("/no_such_route")[0] == 404
    body = {"model": str(engine.path), "token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert engine.ok("/inference/v1/generate", body)["model"] == str(engine.path)


# -- OpenAI's routes


def test_uniforms_are_splitmix64() -> None:
    """Against plain Python integers (Steele, Lea, Flood 2014)."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seeds, positions = [0, 1, 2**63 - 1, 123456789], [0, 1, 77, 10**6]
    want = [
        (mix((mix((s + gamma) & mask) + p * gamma) & mask) >> 24) / 2**40 for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == want


def test_completions(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    body = {"prompt": "3 + 4 =", "temperature": 0, "logprobs": 0, "prompt_logprobs": 0, "return_token_ids": True}
    choice = engine.ok("/v1/completions", body)["choices"][0]
    prompt = tokenizer.encode("3 + 4 =")
    assert choice["prompt_token_ids"] == prompt and 1 <= len(choice["token_ids"]) <= 16
    text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["text"].rstrip("\ufffd") == text.rstrip("\ufffd")  # vLLM leaves out half a character at the end
    want = oracle(engine, prompt + choice["token_ids"]).log_softmax(-1).amax(-1)[len(prompt) - 1 : -1]
    log_probs = choice["logprobs"]
    assert log_probs["token_logprobs"] == pytest.approx(want.tolist(), abs=1e-5)
    assert len(choice["prompt_logprobs"]) == len(prompt)


def test_chat_completions(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    messages = [{"role": "user", "content": "3 + 4 ="}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
    reply = engine.ok("/v1/chat/completions", body)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert reply["prompt_token_ids"] == prompt
    choice = reply["choices"][0]
    assert choice["token_ids"] == engine.generate(prompt, max_tokens=8, temperature=0)["token_ids"]
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert engine.call("/v1/chat/completions", {"messages": []})[0] == 400


def test_models(engine: Engine) -> None:
    (model,) = engine.ok("/v1/models", method="GET")["data"]
    assert (model["id"], model["max_model_len"]) == (str(engine.path), MAX_MODEL_LEN)


# -- the embedded engine's process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process")
    make_checkpoint(path, tied=True)
    return path


def start(command: list[str], **kwargs: Any) -> subprocess.Popen[str]:
    environment = engine_environment() | kwargs.pop("env", {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, **kwargs)


def refused(command: list[str]) -> str:
    process = start(command)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and len(err.strip().splitlines()) == 1 and not out, (process.returncode, out, err)
    return err


@pytest.mark.alone
def test_refused_starts_say_one_line_and_exit_2(checkpoint: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused(engine_command("embedded", checkpoint, port))
    assert "config.json is missing" in refused(engine_command("embedded", tmp_path, 0))
    assert (
        "invalid choice: 'float16'"
        in start(engine_command("embedded", checkpoint, 0, dtype="float16")).communicate()[1]
    )
    for config in (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert config["architectures"][0] in refused(engine_command("embedded", tmp_path, 0))
    assert time.monotonic() - begin < 10  # nothing heavy was loaded


@pytest.mark.alone
def test_the_life_of_the_process(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused; SIGTERM, a dead parent and a closed lifeline each end the engine.

    Four processes at once, because each spends seconds in imports.
    """
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    command = engine_command("embedded", checkpoint, 0)
    code = f"import subprocess, time; p = subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(120)"
    ours, theirs = socket.socketpair()
    lacking = start(engine_command("embedded", tmp_path, 0))
    terminated = start(command)
    lined = start(command, env={"INSTEP_LIFELINE_FD": str(theirs.fileno())}, pass_fds=[theirs.fileno()])
    parent = start([sys.executable, "-c", code])
    theirs.close()
    child = int(parent.stdout.readline())
    for process in (terminated, lined, parent):
        assert "ready at" in process.stdout.readline()
    terminated.send_signal(signal.SIGTERM)
    ours.close()
    parent.kill()
    assert terminated.wait(timeout=2) == 0
    assert lined.wait(timeout=2) == 1
    deadline = time.monotonic() + 2
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    _, err = lacking.communicate(timeout=60)
    assert lacking.returncode == 2 and "model.norm.weight" in err.strip().splitlines()[-1]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

"""`/generate` in the form of vLLM's first server, which Atropos' environments ask, on each kind of engine."""

from __future__ import annotations

import pytest

from tests.engines.oracle import PROMPT, oracle
from tests.engines.running import TOLERANCE, Engine


def test_responses_are_those_of_the_token_route(engine: Engine) -> None:
    params = {"n": 3, "max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "seed": 5, "ignore_eos": True}
    answer = engine.ok("/generate", {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, **params})
    assert answer["prompt_token_ids"] == PROMPT and answer["finish_reasons"] == ["length"] * 3
    assert len(answer["text"]) == 3 and isinstance(answer["prompt"], str)
    for ids, log_probs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        tokens = PROMPT + ids
        expected = (oracle(engine, tokens) / 0.7).log_softmax(-1)
        for t, ((entry,), token) in enumerate(zip(log_probs, ids, strict=True), len(PROMPT)):
            assert list(entry) == [str(token)]
            assert entry[str(token)] == pytest.approx(float(expected[t - 1, token]), abs=TOLERANCE)
    again = engine.choices(PROMPT, logprobs=0, **params)
    assert answer["token_ids"] == [choice["token_ids"] for choice in again]


def test_defaults_texts_and_stop_strings(engine: Engine) -> None:
    whole = engine.ok("/generate", {"prompt": "3 + 4 =", "temperature": 0.0, "ignore_eos": True})
    assert set(whole) == {"text", "prompt", "finish_reasons"} and whole["prompt"] == "3 + 4 ="
    (text,) = whole["text"]
    stop = text[3:6]
    body = {"prompt": "3 + 4 =", "temperature": 0.0, "ignore_eos": True, "stop": [stop], "logprobs": 0}
    cut = engine.ok("/generate", body)
    assert cut["finish_reasons"] == ["stop"] and cut["text"] == [text[: text.index(stop)]]
    assert 0 < len(cut["token_ids"][0]) < 16


@pytest.mark.parametrize("num", [0, 2])
def test_a_prompt_is_scored(engine: Engine, num: int) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "prompt_logprobs": num, "max_tokens": 1, "temperature": 0.0, "n": 1}
    first, *entries = engine.ok("/generate", body)["prompt_logprobs"]
    expected = oracle(engine, PROMPT).log_softmax(-1)
    assert first is None and len(entries) == len(PROMPT) - 1
    for t, entry in enumerate(entries):
        best = expected[t].topk(num).indices.tolist()
        assert set(entry) == {str(token) for token in (PROMPT[t + 1], *best)}
        for token, value in entry.items():
            assert value == pytest.approx(float(expected[t, int(token)]), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": {"prompt_token_ids": PROMPT}, "stream": True}, "stream"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"prompt_token_ids": "x"}}, "token"),
        ({"prompt": {"prompt_token_ids": PROMPT}, "temperature": -1}, "temperature"),
    ],
)
def test_what_it_cannot_do_is_refused(engine: Engine, body: dict, word: str) -> None:
    status, answer = engine.call("/generate", body)
    assert status == 400 and word in answer["error"]["message"]

"""SGLang's `/generate`: what a request asks of vLLM's route, and what its answer becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from instep_engine.sglang_form import Asked, repeated

IDS = [4, 5]


def answer(tokens: list[int], reason: str = "stop", **more: Any) -> dict[str, Any]:
    log_probs = {"content": [{"logprob": -float(token)} for token in tokens]}
    return {"choices": [{"token_ids": tokens, "finish_reason": reason, "logprobs": log_probs, **more}]}


def test_a_request_as_slime_makes_it() -> None:
    params = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "min_new_tokens": 2, "stop": None}
    params |= {"stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True, "sampling_seed": 9}
    asked = Asked.read({"input_ids": IDS, "sampling_params": params | {"spaces_between_special_tokens": False}})
    assert asked.payload(IDS) == {
        "token_ids": IDS,
        "sampling_params": {
            **{"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "min_tokens": 2, "seed": 9},
            **{"skip_special_tokens": False, "logprobs": 0, "detokenize": False, "output_kind": 2},
        },
    }


def test_its_defaults_are_those_of_sglang() -> None:
    assert Asked.read({"text": "a"}).payload(IDS)["sampling_params"]["max_tokens"] == 128
    unbounded = Asked.read({"text": "a", "sampling_params": {"max_new_tokens": None}}).payload(IDS)
    assert "max_tokens" not in unbounded["sampling_params"]  # as long as the context


def test_what_the_router_drops_is_read_from_the_header() -> None:
    whole = {"text": "a", "logprob_start_len": 0, "return_logprob": True, "stream": False}
    whole["sampling_params"] = {"seed": 7, "max_new_tokens": 3, "stop": ["\u00e4" * 9000]}
    passed = {"text": "a", "return_logprob": True, "stream": False, "return_hidden_states": False}
    passed["sampling_params"] = {"max_new_tokens": 3, "stop": ["x"]}
    header = repeated(whole)
    assert header.isascii() and len(header) < 200
    asked = Asked.read(passed, header)
    assert asked.params["seed"] == 7 and asked.params["stop"] == ["x"] and asked.prompt_log_probs


def test_an_answer() -> None:
    asked = Asked.read({"input_ids": IDS, "return_logprob": True, "rid": "r"})
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    found = answer([7, 2], weight_versions=spans)
    reply = asked.reply(IDS, found, "x<end>", 0.5)
    assert asked.shown(found) == [7, 2] and reply["text"] == "x<end>" and reply["output_ids"] == [7, 2]
    assert reply["meta_info"] == {
        **{"id": "r", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 2, "completion_tokens": 2},
        **{"e2e_latency": 0.5, "weight_version": "4", "weight_versions": spans},
        "output_token_logprobs": [[-7.0, 7, None], [-2.0, 2, None]],
    }


@pytest.mark.parametrize(
    ("params", "choice", "shown", "text", "expected", "reason"),
    [
        ({}, ([7, 2], "length"), [7, 2], "ab", "ab", {"type": "length", "length": 2}),
        ({}, ([7], "abort"), [7], "a", "a", "abort"),
        ({"no_stop_trim": False}, ([7, 2], "stop"), [7], "a", "a", {"type": "stop", "matched": 2}),
        ({"stop": "b"}, ([7, 8], "stop"), [7, 8], "ab", "ab", {"type": "stop", "matched": "b"}),
        ({"stop": ["b"], "no_stop_trim": False}, ([7, 8], "stop"), [7, 8], "ab", "a", {"type": "stop", "matched": "b"}),
        ({"max_new_tokens": 0}, ([7], "length"), [], "", "", {"type": "length", "length": 0}),
    ],
)
def test_how_a_response_ends(
    params: dict[str, Any], choice: tuple[list[int], str], shown: list[int], text: str, expected: str, reason: Any
) -> None:
    asked, found = Asked.read({"text": "q", "sampling_params": params}), answer(*choice)
    reply = asked.reply(IDS, found, text, 0.0)
    said = reply["meta_info"]["finish_reason"]
    assert asked.shown(found) == shown and reply["text"] == expected
    assert said == reason or (said["type"] == reason == "abort" and said["message"])


def test_a_prompt_is_scored() -> None:
    """As slime's teachers are asked."""
    asked = Asked.read(
        {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}}
        | {"return_logprob": True, "logprob_start_len": 0}
    )
    assert asked.payload(IDS)["sampling_params"]["max_tokens"] == 1
    found = answer([9], "length") | {"prompt_logprobs": [None, {"5": {"logprob": -0.5}}]}
    meta = asked.reply(IDS, found, "", 0.0)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 4, None], [-0.5, 5, None]] and meta["output_token_logprobs"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON objects"),
        ({"text": "a", "sampling_params": 3}, "JSON objects"),
        ({}, "give text"),
        ({"text": "a", "input_ids": [1]}, "give text"),
        ({"text": ["a", "b"]}, "one prompt"),
        ({"text": "a", "sampling_params": {"n": 2}}, "n must be 1"),
        ({"text": "a", "logprob_start_len": 3}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"regex": "x"}}, "regex"),
        ({"text": "a", "stream": True}, "stream"),
        ({"text": "a", "return_routed_experts": True}, "return_routed_experts"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Asked.read(json.loads(json.dumps(body)))

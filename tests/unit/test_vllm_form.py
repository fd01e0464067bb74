"""The form of vLLM's first server at `/generate`: what a request asks, also through a router, and its answer."""

from __future__ import annotations

import json

import pytest

from instep.engines.gate_main import _known_to
from instep.engines.router import Router
from instep.engines.sglang_router import SglangRouter
from instep_engine import sglang_form
from instep_engine.vllm_form import Asked, for_router, is_asked

BODY = {
    "prompt": {"prompt_token_ids": [4, 5]},
    "logprobs": 0,
    "n": 2,
    "max_tokens": 7,
    "stop": ["\u00e4"],
    "top_k": None,
}


def test_a_request_comes_through_a_router_as_it_was() -> None:
    passed, header = for_router(BODY)
    assert passed == {"input_ids": [4, 5]} and header.isascii()
    assert is_asked(BODY) and is_asked(passed, header) and not is_asked(passed, sglang_form.repeated(passed))
    asked = Asked.read(passed, header)
    assert asked == Asked.read(BODY) and asked.ids == [4, 5]
    params = {"logprobs": 0, "n": 2, "max_tokens": 7, "stop": ["\u00e4"], "detokenize": True, "output_kind": 2}
    assert asked.payload([4, 5]) == {"token_ids": [4, 5], "sampling_params": params}
    params = {"max_tokens": 16, "detokenize": False, "output_kind": 2}
    assert Asked.read({"prompt": "x"}).payload([9])["sampling_params"] == params


def test_a_gate_changes_this_form_alone() -> None:
    body, headers = _known_to(Router, json.dumps(BODY).encode())
    assert json.loads(body) == {"input_ids": [4, 5]} and is_asked({}, headers[0])
    other = json.dumps({"text": 'a "prompt"'}).encode()
    assert _known_to(Router, other) == _known_to(SglangRouter, other) == (other, [])
    more = {"text": "x", "sampling_params": {"n": 1, "logit_bias": {"5": 1.0}}}
    body, headers = _known_to(SglangRouter, json.dumps(more).encode())
    assert headers == [] and json.loads(json.loads(body)["custom_labels"]["instep"]) == {
        "sampling_params": more["sampling_params"]
    }
    with pytest.raises(ValueError, match="sampling parameters of"):
        for_router({**BODY, "stop": ["x" * 5000]})


def test_an_answer() -> None:
    content = [{"logprob": -1.0, "top_logprobs": [{"token": "token_id:7", "logprob": -0.5}]}, {"logprob": -2.0}]
    choices = [
        {"token_ids": [8, 9], "finish_reason": "stop", "stop_reason": "b", "logprobs": {"content": content}},
        {"token_ids": [], "finish_reason": "abort", "logprobs": None},
    ]
    answer = {"choices": choices, "prompt_logprobs": [None, {"5": {"logprob": -3.0, "rank": 1}}]}
    asked = Asked.read({**BODY, "prompt_logprobs": 1})
    assert asked.shown(answer) == [[8, 9], []]
    assert asked.reply([4, 5], answer, "p", ["ab", ""]) == {
        **{"text": ["a", ""], "prompt": "p", "finish_reasons": ["stop", "abort"]},
        **{"prompt_token_ids": [4, 5], "token_ids": [[8, 9], []]},
        "logprobs": [[[{"8": -1.0, "7": -0.5}], [{"9": -2.0}]], []],
        "prompt_logprobs": [None, {"5": -3.0}],
    }


def test_a_text_ends_before_the_stop_string() -> None:
    """Two line breaks are often one token."""
    choice = {"token_ids": [8, 9], "finish_reason": "stop", "stop_reason": "\n"}
    for more, told in (({}, "a"), ({"min_tokens": 1}, "a\nb"), ({"include_stop_str_in_output": True}, None)):
        text = "a\n\n" if not more else "a\nb\n"
        assert Asked.read({**BODY, **more}).reply([4], {"choices": [choice]}, "p", [text])["text"] == [told or text]


@pytest.mark.parametrize("header", ["{}", '["vllm_form"]', '{"vllm_form": 3}', '"vllm_form', ""])
def test_headers_that_are_none(header: str) -> None:
    with pytest.raises(ValueError, match="vllm_form|Expecting|Unterminated"):
        Asked.read({"input_ids": [4]}, header)

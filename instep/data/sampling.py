"""What the tokens of a response were drawn from: the sampling parameters of its requests that shape the distribution.

The trainer scores a sample under softmax(logits / temperature). One temperature therefore holds for all trained tokens
of a sample, and what else changes the distribution (top-p, a penalty, ...) biases the ratio of trainer and engine.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.types import Sample

# With these values a parameter of vLLM changes nothing; those below 1 of top_k are the same, too.
_NEUTRAL: dict[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}
_NEUTRAL |= {"repetition_penalty": 1, "min_tokens": 0, "logit_bias": None, "allowed_token_ids": None}
_NEUTRAL |= {"bad_words": None, "structured_outputs": None}

_asked: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("asked", default=None)


def distribution_of(params: dict[str, Any]) -> dict[str, Any]:
    """Those of `params` (with vLLM's names) that shape the distribution, without values that change nothing."""
    given: dict[str, Any] = {
        name: params.get(name) for name in _NEUTRAL if params.get(name) not in (None, [], {}, _NEUTRAL[name])
    }
    if "top_k" in given and given["top_k"] < 1:
        del given["top_k"]
    temperature = params.get("temperature")
    return {"temperature": 1.0 if temperature is None else temperature, **given}


def truncated_by(sample: Sample) -> dict[str, Any]:
    """What, beside a temperature, changed the distribution that some of the sample's tokens were drawn from."""
    turns = sample.sampling_turns or [distribution_of(sample.sampling_params)]
    return {name: value for turn in turns for name, value in turn.items() if name != "temperature"}


def record_turn(sample: Sample, params: dict[str, Any]) -> None:
    """Keep in `sample` what a request for its next tokens asks for; `params` have vLLM's names."""
    sample.sampling_params = dict(params)
    if not (sample.response_length and (sample.loss_mask is None or any(sample.loss_mask))):
        sample.sampling_turns = []  # nothing of what was sampled before is trained on
    turn = distribution_of(params)
    if turn not in sample.sampling_turns:
        sample.sampling_turns = [*sample.sampling_turns, turn]


@contextmanager
def requests_noted() -> Iterator[list[dict[str, Any]]]:
    """Collect the sampling parameters that `note_request` gets meanwhile in this context and in tasks begun in it."""
    asked: list[dict[str, Any]] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def note_request(params: Any) -> None:
    """Note what a request to the policy's engines samples with; one that only scores its prompt is left out."""
    asked = _asked.get()
    if asked is None or not isinstance(params, dict) or params.get("prompt_logprobs") is not None:
        return
    if all(distribution_of(params) != distribution_of(other) for other in asked):
        asked.append(dict(params))

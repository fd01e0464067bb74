"""What the tokens of a response were drawn from: the sampling parameters of its requests that shape the distribution.

The trainer scores a sample under softmax(logits / temperature). One temperature therefore holds for all trained tokens
of a sample, and what else changes the distribution (top-p, a penalty, ...) biases the ratio of trainer and engine.
A generate function may ask the policy for more than its sample, such as a verdict: only requests whose tokens stand in
the sample count.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from instep.types import Sample

# With these values a parameter of vLLM changes nothing; those below 1 of top_k are the same, too.
_NEUTRAL: dict[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}
_NEUTRAL |= {"repetition_penalty": 1, "min_tokens": 0, "logit_bias": None, "allowed_token_ids": None}
_NEUTRAL |= {"bad_words": None, "structured_outputs": None}

Answer = list[int] | str  # token ids, or the text where the engine gave none


class Presumed(dict[str, Any]):
    """Sampling parameters that instep itself wrote into a sample whose generate function runs."""


@dataclass(frozen=True)
class Request:
    """The sampling parameters of a request to the policy, with vLLM's names, its answers, and the ids of its prompt."""

    params: dict[str, Any]
    answers: list[Answer]
    prompt: list[int] | None


# What is collected (`requests_noted`): the requests, and the parameters that OpenAI's routes take where one has none.
_Noted = tuple[list[Request], Callable[[], dict[str, Any]]]
_requests: contextvars.ContextVar[_Noted | None] = contextvars.ContextVar("requests", default=None)


def distribution_of(params: dict[str, Any]) -> dict[str, Any]:
    """Those of `params` (with vLLM's names) that shape the distribution, without values that change nothing."""
    given: dict[str, Any] = {
        name: params[name] for name in _NEUTRAL if name in params and params[name] not in (None, [], {}, _NEUTRAL[name])
    }
    if "top_k" in given and given["top_k"] < 1:
        del given["top_k"]
    temperature = params.get("temperature")
    return {"temperature": 1.0 if temperature is None else temperature, **given}


def truncated_by(sample: Sample) -> dict[str, Any]:
    """What, beside a temperature, changed the distribution that some of the sample's tokens were drawn from."""
    turns = sample.sampling_turns or [distribution_of(sample.sampling_params)]
    return {name: value for turn in turns for name, value in turn.items() if name != "temperature"}


# ---- what is asked ---------------------------------------------------------------------------------------------------


def record_turn(sample: Sample, params: dict[str, Any]) -> None:
    """Keep in `sample` what a request for its next tokens asks for; `params` have vLLM's names."""
    if _requests.get() is not None:  # `settle` will see the request and its tokens
        sample.sampling_params = Presumed(params)
        return
    sample.sampling_params = dict(params)
    if not (sample.response_length and (sample.loss_mask is None or any(sample.loss_mask))):
        sample.sampling_turns = []  # nothing of what was sampled before is trained on
    turn = distribution_of(params)
    if turn not in sample.sampling_turns:
        sample.sampling_turns = [*sample.sampling_turns, turn]


@contextmanager
def requests_noted(defaults: Callable[[], dict[str, Any]] = dict) -> Iterator[list[Request]]:
    """Collect the requests that are noted meanwhile in this context and in tasks begun in it.

    Args:
        defaults: what OpenAI's routes take for what a request lacks.
    """
    noted: list[Request] = []
    token = _requests.set((noted, defaults))
    try:
        yield noted
    finally:
        _requests.reset(token)


def note_request(params: dict[str, Any], answers: Sequence[Answer], prompt: Any) -> None:
    """Note a request to the policy's engines; one that only scores its prompt is left out."""
    requests = _requests.get()
    if requests is not None and params.get("prompt_logprobs") is None:
        ids = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else None
        requests[0].append(Request(dict(params), [answer for answer in answers if answer], ids))


def note_json(payload: dict[str, Any], answer: dict[str, Any]) -> None:
    """Note a request in the form of vLLM's own route or of OpenAI's, by its JSON and that of its answer."""
    requests = _requests.get()
    choices = answer.get("choices")
    if requests is None or not isinstance(choices, list):
        return
    params = payload.get("sampling_params") or {}
    if "prompt" in payload or "messages" in payload:
        shaping = ("temperature", "max_tokens", "seed", "prompt_logprobs", *_NEUTRAL)
        given = {name: payload[name] for name in shaping if payload.get(name) is not None}
        params = requests[1]() | given
    if isinstance(params, dict):
        prompt = payload.get("token_ids", payload.get("prompt"))
        note_request(params, [_answer(choice) for choice in choices if isinstance(choice, dict)], prompt)


def _answer(choice: dict[str, Any]) -> Answer:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    ids = choice.get("token_ids")
    return ids if isinstance(ids, list) else text.strip() if isinstance(text, str) else ""


# ---- what of it the sample is made of --------------------------------------------------------------------------------


def settle(
    sample: Sample, requests: Sequence[Request], wanted: dict[str, Any], earlier: list[Any], before: int
) -> None:
    """Set what the trained tokens of `sample` were drawn with, unless its generate function has said so.

    Args:
        requests: those that the function made, for this sample or for something else.
        wanted: the run's sampling parameters, with vLLM's names.
        earlier: the turns of the first `before` response tokens, which the sample had when the function got it.
    """
    params = sample.sampling_params
    own = isinstance(params, Presumed) and any(params == known for known in (wanted, *(r.params for r in requests)))
    if sample.sampling_turns in ([], earlier):
        if params and not own:
            sample.sampling_turns = []  # the function's word holds for the whole sample
        else:
            found, kept = _drawn_by(sample, requests, before)
            params = found[-1].params if found else params or wanted
            turns = list(earlier) if kept else []
            for turn in (distribution_of(request.params) for request in found):
                turns += [turn] if turn not in turns else []
            sample.sampling_turns = turns
    sample.sampling_params = dict(params)


def _drawn_by(sample: Sample, requests: Sequence[Request], before: int) -> tuple[list[Request], bool]:
    """The requests that made trained tokens of `sample`, and whether it still has trained ones of those `before`.

    An answer stands where its prompt ends, or wherever else the sample has its tokens, the longest first. Where no
    answer stands in the sample (its function has changed every text), all requests count.
    """
    tokens = list(sample.tokens)
    first = len(tokens) - sample.response_length
    response, given = tokens[first:], sample.loss_mask
    if not before and len(requests) == 1 and requests[0].answers == [response] and requests[0].prompt == tokens[:first]:
        trained = given is None or any(given)  # one request made it all
        return (list(requests) if trained else []), False
    mask = [bool(m) for m in given] if given is not None and len(given) == len(response) else [True] * len(response)
    left: list[bool | None] = list(mask)  # None: an answer stands there
    made: dict[int, bool] = {}  # of requests whose tokens stand in the sample: whether some of them are trained on
    order = [(len(a), r.params == sample.sampling_params, -i) for i, r in enumerate(requests) for a in r.answers]
    for searched in (False, True):
        for number in dict.fromkeys(-i for _, _, i in sorted(order, reverse=True) if -i not in made):
            prompt, found = requests[number].prompt or [], [(0, 0)]
            goes_on = len(prompt) >= first and tokens[: len(prompt)] == prompt
            starts = range(len(response)) if searched else range(len(prompt) - first, len(response))[: int(goes_on)]
            for answer in (answer for answer in requests[number].answers if isinstance(answer, list)):
                best = 0
                for start in starts:
                    if best >= min(len(answer), len(response) - start):  # nothing longer follows
                        break
                    if response[start] == answer[0] and (length := _length_at(answer, response, left, start)) > best:
                        best = length
                        found.append((length, -start))
            length, at = max(found)
            if length:
                made[number] = any(mask[-at : length - at])
                left[-at : length - at] = [None] * length
    if any(left[before:]):
        made |= dict.fromkeys(_standing(sample.response, requests, made), True)
        if not made:
            made = dict.fromkeys(range(len(requests)), True)
    return [request for number, request in enumerate(requests) if made.get(number)], any(left[:before])


def _length_at(answer: list[int], response: list[int], left: list[bool | None], start: int) -> int:
    """How many tokens of `answer` stand in `response` from `start` on; 0 unless it is whole, or ends where the
    response, its mask or another answer does: functions cut answers at a stop string."""
    end = start
    while end - start < len(answer) and end < len(response) and response[end] == answer[end - start]:
        if left[end] is None:
            break
        end += 1
    whole = end - start == len(answer) or end == len(response) or left[end] is None
    return end - start if end > start and (whole or left[end] != left[end - 1]) else 0


def _standing(text: str, requests: Sequence[Request], made: dict[int, bool]) -> list[int]:
    """The requests, but for those in `made`, with an answer that stands in `text`, each in a place of its own."""
    answers = [(a, i) for i, r in enumerate(requests) if i not in made for a in r.answers if isinstance(a, str)]
    out = []
    for answer, number in sorted(answers, key=lambda one: len(one[0]), reverse=True):
        if number not in out and answer in text:
            text = text.replace(answer, "\0" * len(answer), 1)
            out.append(number)
    return out

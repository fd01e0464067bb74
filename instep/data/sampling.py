"""The distribution of a response's tokens: the sampling parameters of its requests that shape it.

The trainer scores a sample under softmax(logits / temperature). So all trained tokens of a sample need one temperature.
Anything else that changes the distribution (top-p, a penalty, ...) biases the ratio of trainer and engine. A generate
function may ask the policy for more than its sample, such as a verdict. Only requests whose tokens are in the sample
count.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from instep.types import Sample

# With these values a parameter of vLLM changes nothing. For top_k this also holds for all values below 1.
_NEUTRAL: dict[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}
_NEUTRAL |= {"repetition_penalty": 1, "min_tokens": 0, "logit_bias": None, "allowed_token_ids": None}
_NEUTRAL |= {"bad_words": None, "structured_outputs": None}

Answer = list[int] | str  # token ids, or the text if the engine gave no ids


class Presumed(dict[str, Any]):
    """Sampling parameters that instep itself wrote into a sample while its generate function runs."""


@dataclass(frozen=True)
class Request:
    """A request to the policy: its sampling parameters with vLLM's names, its answers, and the ids of its prompt."""

    params: dict[str, Any]
    answers: list[Answer]
    prompt: list[int] | None


# What `requests_noted` collects: the requests, and OpenAI's defaults for parameters that a request lacks.
_Noted = tuple[list[Request], Callable[[], dict[str, Any]]]
_requests: contextvars.ContextVar[_Noted | None] = contextvars.ContextVar("requests", default=None)


def distribution_of(params: dict[str, Any]) -> dict[str, Any]:
    """Return the `params` (with vLLM's names) that shape the distribution, without values that change nothing."""
    given: dict[str, Any] = {
        name: params[name] for name in _NEUTRAL if name in params and params[name] not in (None, [], {}, _NEUTRAL[name])
    }
    if "top_k" in given and given["top_k"] < 1:
        del given["top_k"]
    temperature = params.get("temperature")
    return {"temperature": 1.0 if temperature is None else temperature, **given}


def truncated_by(sample: Sample) -> dict[str, Any]:
    """Return what, besides a temperature, changed the distribution of some of the sample's tokens."""
    turns = sample.sampling_turns or [distribution_of(sample.sampling_params)]
    return {name: value for turn in turns for name, value in turn.items() if name != "temperature"}


# ---- what is asked ---------------------------------------------------------------------------------------------------


def record_turn(sample: Sample, params: dict[str, Any]) -> None:
    """Record in `sample` the parameters of a request for its next tokens; `params` have vLLM's names."""
    if _requests.get() is not None:  # `settle` will see the request and its tokens
        sample.sampling_params = Presumed(params)
        return
    sample.sampling_params = dict(params)
    if not (sample.response_length and (sample.loss_mask is None or any(sample.loss_mask))):
        sample.sampling_turns = []  # no earlier tokens are trained on
    turn = distribution_of(params)
    if turn not in sample.sampling_turns:
        sample.sampling_turns = [*sample.sampling_turns, turn]


@contextmanager
def requests_noted(defaults: Callable[[], dict[str, Any]] = dict) -> Iterator[list[Request]]:
    """Collect the requests that are noted in this context and in tasks started in it.

    Args:
        defaults: values of OpenAI's routes for what a request lacks.
    """
    noted: list[Request] = []
    token = _requests.set((noted, defaults))
    try:
        yield noted
    finally:
        _requests.reset(token)


def note_request(params: dict[str, Any], answers: Sequence[Answer], prompt: Any) -> None:
    """Note a request to the policy's engines, except one that only scores its prompt."""
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
    """Set the sampling of the trained tokens of `sample`, unless its generate function has set it.

    Args:
        requests: those that the function made, for this sample or for something else.
        wanted: the run's sampling parameters, with vLLM's names.
        earlier: the turns of the first `before` response tokens, which the sample already had.
    """
    params = sample.sampling_params
    own = isinstance(params, Presumed) and any(params == known for known in (wanted, *(r.params for r in requests)))
    if sample.sampling_turns in ([], earlier):
        if params and not own:
            sample.sampling_turns = []  # the function's value holds for the whole sample
        else:
            found, kept = _drawn_by(sample, requests, before)
            params = found[-1].params if found else params or wanted
            turns = list(earlier) if kept else []
            for turn in (distribution_of(request.params) for request in found):
                turns += [turn] if turn not in turns else []
            sample.sampling_turns = turns
    sample.sampling_params = dict(params)


def _drawn_by(sample: Sample, requests: Sequence[Request], before: int) -> tuple[list[Request], bool]:
    """Return the requests that made trained tokens of `sample`, and whether some of the `before` ones are trained.

    An answer is looked for where its prompt ends, then anywhere in the sample, the longest first. If no answer is in
    the sample (its function has changed every text), all requests count.
    """
    tokens = list(sample.tokens)
    first = len(tokens) - sample.response_length
    response, given = tokens[first:], sample.loss_mask
    if not before and len(requests) == 1 and requests[0].answers == [response] and requests[0].prompt == tokens[:first]:
        trained = given is None or any(given)  # one request made it all
        return (list(requests) if trained else []), False
    mask = [bool(m) for m in given] if given is not None and len(given) == len(response) else [True] * len(response)
    left: list[bool | None] = list(mask)  # None: an answer is there
    made: dict[int, bool] = {}  # by request in the sample: whether some of its tokens are trained on
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
    """Return how many tokens of `answer` are in `response` from `start` on.

    It is 0 unless the answer is whole, or ends where the response, its mask or another answer ends: functions cut
    answers at a stop string.
    """
    end = start
    while end - start < len(answer) and end < len(response) and response[end] == answer[end - start]:
        if left[end] is None:
            break
        end += 1
    whole = end - start == len(answer) or end == len(response) or left[end] is None
    return end - start if end > start and (whole or left[end] != left[end - 1]) else 0


def _standing(text: str, requests: Sequence[Request], made: dict[int, bool]) -> list[int]:
    """Return the requests outside `made` whose answer is in `text`, each in a different place."""
    answers = [(a, i) for i, r in enumerate(requests) if i not in made for a in r.answers if isinstance(a, str)]
    out = []
    for answer, number in sorted(answers, key=lambda one: len(one[0]), reverse=True):
        if number not in out and answer in text:
            text = text.replace(answer, "\0" * len(answer), 1)
            out.append(number)
    return out

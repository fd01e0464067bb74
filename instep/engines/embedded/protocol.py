"""vLLM's JSON: what a request may say, checked key by key, and how log-probs are written."""

from __future__ import annotations

import math
from asyncio import Future
from dataclasses import dataclass, field
from typing import Any


class BadRequestError(Exception):
    """An HTTP error whose type is the class's name; `tensor` names the weight that a mismatch is about."""

    status = 400

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(message)
        self.tensor = tensor


class NotFoundError(BadRequestError):
    status = 404


class SessionError(BadRequestError):  # a weight call that does not fit the state of the session
    status = 409


class WeightMismatch(BadRequestError):  # what was received is not what the model or the manifest says
    status = 409


class ServiceUnavailable(BadRequestError):
    status = 503


@dataclass(slots=True, frozen=True)
class Sampling:
    """Checked sampling parameters. `stop_ids` are the caller's and, unless ignored, the model's `eos_ids`."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True


Score = tuple[int, float, int, tuple[tuple[int, float], ...]]  # id, log-prob, rank; the likeliest ids and log-probs


@dataclass(slots=True, eq=False)
class Request:
    """One response in the making."""

    id: str
    index: int
    prompt: list[int]
    params: Sampling
    seed: int
    end: int  # total length at which it stops
    future: Future[None]
    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] | None = None  # from the second token on
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # weight version, start, end
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""


# Parameters that act: integers with their least value, numbers with their greatest (the least is 0), and others.
_INTEGERS = dict(max_tokens=1, min_tokens=0, top_k=-1, n=1, seed=-(2**63), logprobs=0, prompt_logprobs=0)
_NUMBERS = dict(temperature=math.inf, top_p=1, min_p=1)
_ACTING = {*_INTEGERS, *_NUMBERS, "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"}
# vLLM's parameters that change nothing at this value (or null, or empty): any other value is refused.
_NEUTRAL: dict[str, Any] = dict(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, output_mode="tokens")
_NEUTRAL |= dict.fromkeys(("stream", "echo", "include_stop_str_in_output"), False)
_NEUTRAL |= dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "tools", "extra_args"))
_IGNORED = {"detokenize", "spaces_between_special_tokens", "priority", "cache_salt", "user"}


def check_keys(given: dict[str, Any], known: set[str]) -> None:
    for key, value in given.items():
        if key in _NEUTRAL and value != _NEUTRAL[key] and value not in (None, [], {}):
            raise BadRequestError(f"{key}={value!r} is not supported by the embedded engine: leave it out")
        if key not in known and key not in _NEUTRAL and key not in _IGNORED:
            raise BadRequestError(f"unknown parameter {key!r}; known are {', '.join(sorted(known))}")


def sampling_params(given: Any, own: set[str], eos_ids: frozenset[int], vocab_size: int) -> Sampling:
    """Sampling parameters from JSON; `own` are the other keys of that object. Raises BadRequestError."""
    if not isinstance(given, dict):
        raise BadRequestError("sampling_params must be an object")
    check_keys(given, own | _ACTING)
    out: dict[str, Any] = {}
    for key in [k for k in (*_INTEGERS, *_NUMBERS) if given.get(k) is not None]:
        value, low, high = given[key], _INTEGERS.get(key, 0), _NUMBERS.get(key, 2**63 - 1)
        right = type(value) is int or (type(value) is float and key in _NUMBERS)
        if not right or not low <= value <= high or value == math.inf or (key == "top_p" and not value):
            kind = "an integer" if key in _INTEGERS else "a number"
            raise BadRequestError(f"{key} must be {kind} from {low} to {high}, got {value!r}")
        out[key] = max(value, 0) if key == "top_k" else value
    if (out.get("max_tokens") or math.inf) < out.get("min_tokens", 0):
        raise BadRequestError(f"min_tokens={out['min_tokens']} is greater than max_tokens={out['max_tokens']}")
    if out.get("temperature") == 0:
        out |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # greedy, and its log-prob is that of the whole distribution
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise BadRequestError("stop must be a non-empty string or a list of them")
    eos_ids = frozenset() if given.get("ignore_eos") else eos_ids
    stop_ids = eos_ids.union(token_ids(given.get("stop_token_ids") or [], "stop_token_ids", vocab_size))
    skip = given.get("skip_special_tokens") is not False
    return Sampling(**out, stop=tuple(stop), stop_ids=tuple(stop_ids), eos_ids=eos_ids, skip_special_tokens=skip)


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(x) is int for x in value):
        raise BadRequestError(f"{name} must be a list of integers")
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        raise BadRequestError(f"{name} holds an id outside the vocabulary of {vocab_size}")
    return value


def log_prob_entries(request: Request) -> list[dict[str, Any]]:
    """`logprobs.content`: one entry per token of the response."""
    k = request.params.logprobs
    tops = [[_entry(*best, rank) for rank, best in enumerate(s[3][:k], 1)] for s in request.scores]
    return [_entry(*s[:3]) | {"top_logprobs": top} for s, top in zip(request.scores, tops, strict=True)]


def _entry(token: int, log_prob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": log_prob if log_prob > -9999.0 else -9999.0, "rank": rank}  # also for NaN


def prompt_entries(request: Request) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: nothing for the first token, then `{id: {logprob, rank}}`."""
    if request.prompt_scores is None:
        return None
    tables = [[*((*b, k) for k, b in enumerate(top, 1)), s] for *s, top in request.prompt_scores]
    return [None, *({str(t): {"logprob": max(p, -9999.0), "rank": k} for t, p, k in table} for table in tables)]

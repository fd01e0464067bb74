"""vLLM's JSON: what a request may say, checked key by key, and how a response is written."""

from __future__ import annotations

import difflib
import math
from asyncio import Future
from dataclasses import dataclass, field
from typing import Any


class Refusal(Exception):
    """An HTTP error; 400 unless a subclass says otherwise. `tensor` names the weight that a mismatch is about."""

    status, kind = 400, "BadRequestError"

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(message)
        self.tensor = tensor


class NotFound(Refusal):
    status, kind = 404, "NotFoundError"


class SessionError(Refusal):
    """A weight call that does not fit the state of the session."""

    status, kind = 409, "SessionError"


class WeightMismatch(Refusal):
    """What was received is not what the model or the manifest says."""

    status, kind = 409, "WeightMismatch"


class Unavailable(Refusal):
    status, kind = 503, "ServiceUnavailable"


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


Top = list[tuple[int, float]]  # the likeliest tokens and their log-probs


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
    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)  # empty unless asked for
    prompt_scores: list[tuple[int, float, int, Top]] | None = None  # id, log-prob, rank, top; from the second token on
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # weight version, start, end
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""


# Parameters that act: integers with their least value, numbers with their greatest (the least is 0), and others.
_INTEGERS = {
    "max_tokens": 1,
    "min_tokens": 0,
    "top_k": -1,
    "n": 1,
    "seed": -(2**63),
    "logprobs": 0,
    "prompt_logprobs": 0,
}
_NUMBERS = {"temperature": math.inf, "top_p": 1, "min_p": 1}
_ACTING = {*_INTEGERS, *_NUMBERS, "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"}
# vLLM's parameters that change nothing at these values (or null, or empty): any other value is refused.
_NEUTRAL: dict[str, Any] = dict.fromkeys(["presence_penalty", "frequency_penalty"], 0)
_NEUTRAL |= dict.fromkeys(["stream", "echo", "use_beam_search", "include_stop_str_in_output"], False)
_NEUTRAL |= dict.fromkeys(["logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "tools", "suffix"])
_NEUTRAL |= dict.fromkeys(["features", "kv_transfer_params", "chat_template", "stream_options", "extra_args"])
_NEUTRAL |= {"repetition_penalty": 1, "best_of": 1, "output_mode": "tokens", "tool_choice": "none"}
_NEUTRAL |= {"response_format": {"type": "text"}}
_IGNORED = {
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
    "flat_logprobs",
    "priority",
    "cache_salt",
    "user",
}


def check_keys(given: dict[str, Any], known: set[str]) -> None:
    for key, value in given.items():
        if key in _NEUTRAL:
            if value != _NEUTRAL[key] and value not in (None, [], {}):
                raise Refusal(f"{key}={value!r} is not supported by the embedded engine: leave it out")
        elif key not in known and key not in _IGNORED:
            near = difflib.get_close_matches(key, known | set(_NEUTRAL), 1)
            raise Refusal(f"unknown parameter {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def sampling_params(given: Any, own: set[str], eos_ids: frozenset[int], vocab_size: int) -> Sampling:
    """Sampling parameters from JSON; `own` are the other keys of that object. Raises Refusal."""
    if not isinstance(given, dict):
        raise Refusal("sampling_params must be an object")
    check_keys(given, own | _ACTING)
    out: dict[str, Any] = {}
    for key in [k for k in (*_INTEGERS, *_NUMBERS) if given.get(k) is not None]:
        value, low, high = given[key], _INTEGERS.get(key, 0), _NUMBERS.get(key, 2**63 - 1)
        right = type(value) is int or (type(value) is float and key in _NUMBERS)
        if not right or not low <= value <= high or value == math.inf or (key == "top_p" and not value):
            kind = "an integer" if key in _INTEGERS else "a number"
            raise Refusal(f"{key} must be {kind} from {low} to {high}, got {value!r}")
        out[key] = max(value, 0) if key == "top_k" else value
    if (out.get("max_tokens") or math.inf) < out.get("min_tokens", 0):
        raise Refusal(f"min_tokens={out['min_tokens']} is greater than max_tokens={out['max_tokens']}")
    if out.get("temperature") == 0:
        out |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # greedy, and its log-prob is that of the whole distribution
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refusal("stop must be a non-empty string or a list of them")
    eos_ids = frozenset() if given.get("ignore_eos") else eos_ids
    stop_ids = eos_ids.union(token_ids(given.get("stop_token_ids") or [], "stop_token_ids", vocab_size))
    skip = given.get("skip_special_tokens") is not False
    return Sampling(**out, stop=tuple(stop), stop_ids=tuple(stop_ids), eos_ids=eos_ids, skip_special_tokens=skip)


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(x) is int for x in value):
        raise Refusal(f"{name} must be a list of integers")
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        raise Refusal(f"{name} holds an id outside the vocabulary of {vocab_size}")
    return value


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > -9999.0 else -9999.0  # also NaN


def usage(requests: list[Request]) -> dict[str, int]:
    prompt = sum(len(r.prompt) for r in requests if r.index == 0)
    completion = sum(len(r.tokens) for r in requests)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def log_prob_entries(request: Request) -> list[dict[str, Any]] | None:
    """`logprobs.content` of `/inference/v1/generate`; None if not asked for."""
    if request.params.logprobs is None:
        return None
    tops = request.tops or [[]] * len(request.tokens)
    return [
        {"token_id": token, "logprob": _finite(log_prob), "rank": rank, "top_logprobs": _top(top) if top else []}
        for token, log_prob, rank, top in zip(request.tokens, request.log_probs, request.ranks, tops, strict=True)
    ]


def _top(top: Top) -> list[dict[str, Any]]:
    return [{"token_id": t, "logprob": _finite(p), "rank": rank} for rank, (t, p) in enumerate(top, 1)]


class Texts:
    """What needs the tokenizer; None where the checkpoint has none."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def decode(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token])

    def response(self, request: Request) -> str:
        """The decoded response, cut before the stop string that ended it."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=request.params.skip_special_tokens)
        return text.partition(request.stop_reason)[0] if isinstance(request.stop_reason, str) else text

    def prompt_logprobs(self, request: Request) -> list[dict[str, Any] | None] | None:
        if request.prompt_scores is None:
            return None
        out: list[dict[str, Any] | None] = [None]
        for token, log_prob, rank, top in request.prompt_scores:
            entries = {t: (p, k) for k, (t, p) in enumerate(top, 1)} | {token: (log_prob, rank)}
            dicts = {t: {"logprob": _finite(p), "rank": k} for t, (p, k) in entries.items()}
            out.append({str(t): d | {"decoded_token": self.decode(t)} for t, d in dicts.items()})
        return out

    def logprobs(self, request: Request, chat: bool, as_ids: bool) -> dict[str, Any] | None:
        """`logprobs` of a completion, or of a chat completion."""
        content = log_prob_entries(request)
        if content is None:
            return None
        for entry in [x for e in content for x in (e, *e["top_logprobs"])]:
            token = entry["token_id"]
            entry["token"] = f"token_id:{token}" if as_ids or self.tokenizer is None else self.decode(token)
        if chat:
            return {"content": content}
        tokens, log_probs = [e["token"] for e in content], [e["logprob"] for e in content]
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        tops = [{x["token"]: x["logprob"] for x in (*e["top_logprobs"], e)} for e in content]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": tops, "text_offset": offsets}

"""vLLM's JSON: checks of every key of a request, and the state of one response."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Ranked = tuple[int, float, int]  # a token, its log-prob, and its rank (1: the likeliest)
MAX_DEPTH = 64  # maximum nesting of a request's JSON
MAX_RESPONSES = 16384  # per request: prompts times n
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # stop strings are searched after every token
ADD_SPECIAL = "add_special_tokens"  # a request's key: whether the tokenizer adds special tokens
STATUS = {"BadRequestError": 400, "Unauthorized": 401, "Forbidden": 403, "NotFoundError": 404, "SessionError": 409}
STATUS |= {"WeightMismatch": 409, "Unavailable": 503}


@dataclass(eq=False)
class HttpError(Exception):
    """An error reply. `kind` decides its HTTP status; `tensor` names the weight of a mismatch."""

    kind: str
    message: str
    tensor: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def status(self) -> int:
        return STATUS.get(self.kind, 500)

    def body(self) -> dict[str, Any]:
        return {"message": self.message[:2000], "type": self.kind, "code": self.status, "tensor": self.tensor}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One response in progress. `eos_ids` are the model's end-of-sequence tokens, or empty to ignore them."""

    id: str  # the client's number
    number: int = -1  # ours
    prompt: list[int]
    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: list[str]
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    skip_special_tokens: bool
    wants_text: bool
    stream: bool = False
    text: str = ""
    token_texts: list[str] = field(default_factory=list)  # if text and log-probs are requested
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # if `logprobs` is above 0: ids and log-probs
    prompt_scores: list[list[Ranked]] | None = None  # from the second token on: its own, and those of likely tokens
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # weight version, start, end
    finish_reason: str = ""
    stop_reason: int | str | None = None
    num_cut: int = 0  # characters to cut: the stop string that ended it, and the rest
    routed_experts_prompt_start: int = 0  # prompt tokens whose experts are not requested
    routes: list[np.ndarray] = field(default_factory=list)  # of the computed tokens, in pieces
    num_routes: int = 0
    arrived: int = 0  # the time by the profile's clock, while it records
    # For a stream: text up to token `shown` has been sent (decoded from token `context` on), and `reported` tokens.
    context: int = 0
    shown: int = 0
    reported: int = 0

    def add_routes(self, rows: np.ndarray) -> None:
        """Store the experts of the tokens that have none yet: the last ones that a step has computed."""
        missing = len(self.prompt) + len(self.tokens) - self.num_routes
        self.routes.append(rows[len(rows) - missing :])
        self.num_routes += missing


@dataclass(slots=True)
class Progress:
    """New tokens of a streamed response. `text` is their addition to it, once its last character is whole."""

    text: str
    tokens: list[int]
    log_probs: list[float]
    token_texts: list[str]


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request; an empty body is an empty object.

    Raises:
        HttpError: it is not a JSON object, is nested too deeply, or holds half a surrogate pair, which is not text.
    """
    try:
        body = json.loads(text := raw.decode() or "{}")
        if re.search(r"\\u[dD]", text):
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        why = "half a surrogate pair" if isinstance(error, UnicodeEncodeError) else str(error)
        raise HttpError("BadRequestError", f"the body is no JSON object: {why}") from error
    if not isinstance(body, dict):
        raise HttpError("BadRequestError", "the body is no JSON object")
    level: list[Any] = [body] if text.count("[") + text.count("{") > MAX_DEPTH else []
    for _ in range(MAX_DEPTH):
        values = (v for inner in level for v in (inner.values() if type(inner) is dict else inner))
        level = [v for v in values if type(v) in (list, dict)]
    if level:
        raise HttpError("BadRequestError", f"the body is nested more than {MAX_DEPTH} deep")
    return body


def streams(body: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a request wants a stream, and the usage at its end. Raises HttpError."""
    stream, options = body.get("stream"), body.get("stream_options")
    usage = options.get("include_usage") if isinstance(options, dict) and options.keys() <= {"include_usage"} else None
    if type(stream or False) is not bool or (options is not None and not (stream and type(usage) is bool)):
        message = "stream must be a boolean, stream_options {'include_usage': boolean}, only with stream"
        raise HttpError("BadRequestError", message)
    if stream and body.get("prompt_logprobs") is not None:
        raise HttpError("BadRequestError", "prompt_logprobs cannot be streamed")
    return bool(stream), bool(usage)


def adds_special(body: dict[str, Any], default: bool) -> bool:
    """Return whether the tokenizer adds its special tokens to a text. Raises HttpError."""
    add = body.get(ADD_SPECIAL)
    if add not in (None, True, False):
        raise HttpError("BadRequestError", f"{ADD_SPECIAL} must be a boolean")
    return default if add is None else bool(add)


_MAX = 2**63 - 1
_RANGES: dict[str, Any] = dict(max_tokens=(int, 1, _MAX), min_tokens=(int, 0, _MAX), top_k=(int, -1, _MAX))
_RANGES |= dict(n=(int, 1, 4096), seed=(int, -_MAX, _MAX), logprobs=(int, 0, _MAX), prompt_logprobs=(int, 0, _MAX))
_RANGES |= dict(routed_experts_prompt_start=(int, 0, _MAX), temperature=(float, 0, 1e9), top_p=(float, 1e-6, 1))
_ACTING = {*_RANGES, "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "detokenize"}
# vLLM's parameters that change nothing at this value or null. Any other value is refused.
_NEUTRAL: dict[str, Any] = dict(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, min_p=0)
_NEUTRAL |= dict(stream=False, echo=False, include_stop_str_in_output=False, spaces_between_special_tokens=True)
# vllm-router adds these to every chat or completion request.
_NEUTRAL |= dict(no_stop_trim=False, continue_final_message=False, separate_reasoning=True, stream_reasoning=True)
_NEUTRAL |= dict(include_reasoning=True, return_hidden_states=False, top_logprobs=0, output_kind=2)
_NEUTRAL |= dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "extra_args", "user"))


def check_keys(given: dict[str, Any], known: set[str]) -> None:
    for key, value in given.items():
        if key not in known and (key not in _NEUTRAL or value not in (None, _NEUTRAL[key])):
            raise HttpError("BadRequestError", f"{key}={value!r} is not supported here; known: {sorted(known)}")


def sampling_params(given: Any, own: set[str], eos_ids: frozenset[int], vocab_size: int) -> dict[str, Any]:
    """Read `n` and fields of a Request from JSON, which may also have the keys `own`. Raises HttpError."""
    if not isinstance(given, dict):
        raise HttpError("BadRequestError", "sampling_params must be an object")
    check_keys(given, own | _ACTING)
    out = {key: given[key] for key in _RANGES if given.get(key) is not None}
    for key, value in out.items():
        kind, low, high = _RANGES[key]
        if type(value) not in (int, kind) or not low <= value <= high:
            raise HttpError("BadRequestError", f"{key} must be {kind.__name__}, {low} to {high}, got {value!r}")
    if out.get("min_tokens", 0) > out.get("max_tokens", _MAX):
        raise HttpError("BadRequestError", f"min_tokens={out['min_tokens']} is more than max_tokens")
    for key in ("logprobs", "prompt_logprobs") if own else ():
        if out.get(key):
            what = f"{key}={out[key]}: this route returns only the token's own (0); /inference/v1/generate returns more"
            raise HttpError("BadRequestError", what)
    out["top_k"] = max(out.get("top_k", 0), 0)
    if out.get("temperature") == 0:
        out |= {"top_k": 0, "top_p": 1.0}  # greedy, with its log-prob in the whole distribution
    stop = given.get("stop") or []
    out["stop"] = stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise HttpError("BadRequestError", "stop must be a non-empty string or a list of them")
    if len(stop) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in stop):
        raise HttpError("BadRequestError", f"stop: at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters")
    if stop and given.get("detokenize") is False:
        raise HttpError("BadRequestError", "stop strings need detokenize")
    out["stop_ids"] = frozenset(token_ids(given.get("stop_token_ids") or [], "stop_token_ids", vocab_size))
    out["eos_ids"] = frozenset() if given.get("ignore_eos") else eos_ids
    return out | {"skip_special_tokens": given.get("skip_special_tokens") is not False}


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(x) is int for x in value):
        raise HttpError("BadRequestError", f"{name} must be a list of integers")
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        raise HttpError("BadRequestError", f"{name} holds an id outside the vocabulary of {vocab_size}")
    return value

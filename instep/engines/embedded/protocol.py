"""vLLM's JSON: requests checked key by key, responses built."""

from __future__ import annotations

import difflib
import math
from typing import Any

from instep.engines.embedded.scheduler import Request, Sampling


class BadRequest(Exception):
    """HTTP 400: the message names the field."""


# Sampling parameters that act, with (type, lowest, highest); None is allowed for all and means the default.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, math.inf),
    "min_tokens": (int, 0, math.inf),
    "temperature": (float, 0, math.inf),
    "top_k": (int, -1, math.inf),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "n": (int, 1, math.inf),
    "seed": (int, -(2**63), 2**63 - 1),
    "logprobs": (int, 0, math.inf),
    "prompt_logprobs": (int, 0, math.inf),
}
_OTHERS = {"stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"}
# vLLM's parameters that do nothing at these values; another value would change the result, so it is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "features": (),
    "kv_transfer_params": (),
    "chat_template": (),
    "output_mode": ("tokens",),
    "return_tokens_as_token_ids": (False,),
}
_IGNORED = {"detokenize", "spaces_between_special_tokens", "output_kind", "priority", "cache_salt", "user", "flat_logprobs"}


def sampling_params(
    given: dict[str, Any], *, allowed: set[str], eos_ids: frozenset[int], vocab_size: int, max_num_seqs: int
) -> Sampling:
    """Sampling parameters from JSON; `allowed` are the route's other keys.

    Raises:
        BadRequest: a key that is unknown or not supported, or a value of the wrong type or range.
    """
    if not isinstance(given, dict):
        raise BadRequest("sampling parameters must be an object")
    out: dict[str, Any] = {}
    for key, value in given.items():
        if key in allowed or key in _IGNORED or value is None:
            known = allowed | _IGNORED | _OTHERS | set(_NUMBERS) | set(_NEUTRAL) | {"stream", "stream_options"}
            if key not in known:
                raise BadRequest(_unknown(key, known))
        elif key in _NUMBERS:
            out[key] = _number(key, value)
        elif key in ("stream", "stream_options"):
            if value:
                raise BadRequest("streaming is not supported by the embedded engine: leave 'stream' out")
        elif key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise BadRequest(f"{key}={value!r} is not supported by the embedded engine")
        elif key not in _OTHERS:
            raise BadRequest(_unknown(key, allowed | _OTHERS | set(_NUMBERS) | set(_NEUTRAL)))
    stop = given.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stop):
        raise BadRequest("stop must be a non-empty string or a list of them")
    ids = token_ids(given.get("stop_token_ids") or [], "stop_token_ids", vocab_size)
    eos_ids = frozenset() if given.get("ignore_eos") else eos_ids
    skip = given.get("skip_special_tokens")
    params = Sampling(
        **out, stop=stop, stop_ids=tuple({*ids, *eos_ids}), eos_ids=eos_ids, skip_special_tokens=skip is not False
    )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest(f"min_tokens={params.min_tokens} is greater than max_tokens={params.max_tokens}")
    if params.n > max_num_seqs:
        raise BadRequest(f"n={params.n} is greater than --max-num-seqs {max_num_seqs}")
    return params


def refuse_unknown(body: dict[str, Any], known: set[str]) -> None:
    """Keys of a body that holds no sampling parameters."""
    for key in [k for k in body if k not in known and k not in _IGNORED]:
        if key in ("stream", "stream_options", *_NEUTRAL):
            if body[key] and body[key] not in _NEUTRAL.get(key, ()):
                raise BadRequest(f"{key}={body[key]!r} is not supported by the embedded engine")
        else:
            raise BadRequest(_unknown(key, known))


def _unknown(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"unknown parameter {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _number(key: str, value: Any) -> Any:
    kind, low, high = _NUMBERS[key]
    types = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high or value == math.inf:
        raise BadRequest(f"{key} must be {'an integer' if kind is int else 'a number'} in [{low}, {high}], got {value!r}")
    if key == "top_p" and value == 0:
        raise BadRequest("top_p must be greater than 0")
    return max(value, 0) if key == "top_k" else value


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(x) is int for x in value):
        raise BadRequest(f"{name} must be a list of integers")
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        raise BadRequest(f"{name} holds an id outside the vocabulary of {vocab_size}")
    return value


def finite(log_prob: float) -> float:
    return log_prob if log_prob > -9999.0 else -9999.0  # also NaN


def text_of(request: Request, tokenizer: Any) -> str:
    """The decoded response, cut before the stop string that ended it."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(request.tokens, skip_special_tokens=request.params.skip_special_tokens)
    return text.partition(request.stop_reason)[0] if isinstance(request.stop_reason, str) else text


def generate_choice(request: Request, index: int) -> dict[str, Any]:
    content = None
    if request.params.logprobs is not None:
        tops = request.tops or [[]] * len(request.tokens)
        content = [
            {
                "token_id": token,
                "logprob": finite(log_prob),
                "rank": rank,
                "top_logprobs": [
                    {"token_id": t, "logprob": finite(p), "rank": k} for k, (t, p) in enumerate(top, 1)
                ],
            }
            for token, log_prob, rank, top in zip(request.tokens, request.log_probs, request.ranks, tops, strict=True)
        ]
    return {
        "index": index,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": request.tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in request.spans],
        "logprobs": None if content is None else {"content": content},
    }


def openai_logprobs(request: Request, tokenizer: Any, chat: bool) -> dict[str, Any] | None:
    """`logprobs` of a completion, or of a chat completion."""
    if request.params.logprobs is None:
        return None

    def name(token: int) -> str:
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])

    tokens, log_probs = [name(t) for t in request.tokens], [finite(x) for x in request.log_probs]
    tops = [[(name(t), finite(p)) for t, p in top] for top in request.tops or [[]] * len(tokens)]
    if not chat:
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        top_dicts = [dict(top) | {t: p} for top, t, p in zip(tops, tokens, log_probs, strict=True)]
        offsets = offsets[: len(tokens)]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": top_dicts, "text_offset": offsets}

    def entry(token: str, log_prob: float) -> dict[str, Any]:
        return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}

    zipped = zip(tokens, log_probs, tops, strict=True)
    return {"content": [entry(t, p) | {"top_logprobs": [entry(*x) for x in top]} for t, p, top in zipped]}


def prompt_logprobs(request: Request, tokenizer: Any) -> list[dict[str, Any] | None] | None:
    if request.prompt_scores is None:
        return None
    out: list[dict[str, Any] | None] = [None]
    for token, log_prob, rank, top in request.prompt_scores:
        entries = {t: (p, k) for k, (t, p) in enumerate(top, 1)} | {token: (log_prob, rank)}
        out.append(
            {
                str(t): {
                    "logprob": finite(p),
                    "rank": k,
                    "decoded_token": None if tokenizer is None else tokenizer.decode([t]),
                }
                for t, (p, k) in entries.items()
            }
        )
    return out


def usage(requests: list[Request]) -> dict[str, int]:
    prompt = sum(len(r.prompt) for r in requests if r.index == 0)
    completion = sum(len(r.tokens) for r in requests)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

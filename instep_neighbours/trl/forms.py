"""The JSON of TRL's generation routes, of both generations, and their translation to the engines' route.

Each becomes one request per prompt to vLLM's `/inference/v1/generate`, which every kind of engine answers: token ids
in, token ids out. So prompts are divided among all engines, and all engines answer in the same form.
"""

from __future__ import annotations

import base64
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instep.engines.wire import FINAL_ONLY
from instep_neighbours.trl.clients import BadRequest, Body, of_type

TOKEN = "token_id:"  # vLLM's name of a token by its id
# TRL's own defaults of /generate/ and /chat/.
LEGACY = {"n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
LEGACY |= {"max_tokens": 16, "logprobs": 0}
# Their other fields: guided_decoding_regex is of TRL <= 0.26, truncate_prompt_tokens of 0.24 to 0.29.
_MORE = {"guided_decoding_regex", "structured_outputs_regex", "truncate_prompt_tokens", "generation_kwargs"}
LEGACY_GENERATE = frozenset(LEGACY.keys() | _MORE | {"prompts", "images"})
LEGACY_CHAT = frozenset(LEGACY.keys() | _MORE | {"messages", "chat_template_kwargs", "tools"})
# Fields of vLLM's SamplingParams that a request may set; vLLM itself does not report unknown names.
SAMPLING = frozenset(
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids "
    "ignore_eos max_tokens min_tokens logprobs prompt_logprobs skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output logit_bias allowed_token_ids bad_words structured_outputs detokenize".split()
)
# Fields of OpenAI's routes about the form of the answer.
ANSWER = frozenset("model prompt messages return_token_ids return_tokens_as_token_ids stream echo user".split())
RENDERING = ("add_generation_prompt", "continue_final_message")
CHAT = ANSWER | set("tools tool_choice chat_template chat_template_kwargs top_logprobs".split()) | set(RENDERING)
Namer = Callable[[int], str]


@dataclass(frozen=True)
class Asked:
    """The parameters of a request, without its prompts.

    Attributes:
        params: of each request to an engine.
        logprobs: the number per token beside its own; None: without its own, too.
    """

    params: Body
    logprobs: int | None

    @classmethod
    def of(cls, given: Body) -> Asked:
        """Read sampling parameters with vLLM's names. Raises BadRequest."""
        params = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(params.keys() - SAMPLING):
            what = f"{', '.join(unknown)}: this server does not accept these sampling parameters; it accepts"
            raise BadRequest(f"{what} {', '.join(sorted(SAMPLING))}")
        logprobs = params.get("logprobs")
        if logprobs is not None and (type(logprobs) is not int or logprobs < 0):
            raise BadRequest(f"logprobs must be null or a whole number from 0 on, got {logprobs!r}")
        if logprobs:
            params["logprobs"] = logprobs + 1  # vLLM's route includes the sampled token in this number
        return cls({"detokenize": bool(given.get("stop")), "output_kind": FINAL_ONLY, **params}, logprobs)

    def payload(self, model: str, ids: list[int]) -> Body:
        return {"model": model, "token_ids": ids, "sampling_params": self.params}


# ---- TRL <= 1.10 -----------------------------------------------------------------------------------------------------


def legacy_asked(body: Body, known: frozenset[str]) -> Asked:
    """Return the sampling parameters of /generate/ or /chat/, which has the fields `known`. Raises BadRequest."""
    if unknown := sorted(body.keys() - known):
        raise BadRequest(f"{', '.join(unknown)}: unknown fields; use {', '.join(sorted(known))}")
    more = of_type(body, "generation_kwargs", dict, None) or {}
    given = {name: body.get(name, default) for name, default in LEGACY.items()} | more
    for name in ("guided_decoding_regex", "structured_outputs_regex"):
        if (regex := body.get(name)) is not None:
            given["structured_outputs"] = {"regex": regex}
    return Asked.of(given)


def legacy_prompts(body: Body) -> list[Any]:
    """Return the prompts of /generate/, texts or lists of token ids. Raises BadRequest."""
    if any(body.get("images") or ()):
        raise BadRequest("images are not supported: this server is for text models")
    return _prompts(of_type(body, "prompts", list))


def legacy_cut(body: Body, prompts: list[list[int]]) -> list[list[int]]:
    """Return the last `truncate_prompt_tokens` of each prompt. Raises BadRequest."""
    last = body.get("truncate_prompt_tokens")
    if last is not None and (type(last) is not int or last < 1):
        raise BadRequest(f"truncate_prompt_tokens must be null or a whole number above 0, got {last!r}")
    return [ids[-last:] for ids in prompts] if last else prompts


def legacy_answer(body: Body, prompts: Sequence[list[int]], answers: Sequence[Body], asked: Asked) -> Body:
    """Return the answer of /generate/ and /chat/, prompt by prompt, each with its n completions.

    Clients of TRL <= 0.28 send no `logprobs`: they expect one number for each token, and later ones a list.
    """
    flat = "logprobs" not in body
    choices = [choice for answer in answers for choice in answer["choices"]]
    made: Body = {"prompt_ids": list(prompts), "completion_ids": [choice["token_ids"] for choice in choices]}
    if asked.logprobs is None:
        return made | {"logprobs": None, "logprob_token_ids": None}
    entries = [tokens_of(choice, 0 if flat else asked.logprobs) for choice in choices]
    if flat:
        return made | {"logprobs": [[number(lp) for ((_, lp),) in tokens] for tokens in entries]}
    return made | _columns(entries)


def _columns(rows: list[list[list[tuple[int, float]]]]) -> Body:
    """Return log-probs and ids of the tokens at each place of each row."""
    return {
        "logprobs": [[[number(lp) for _, lp in place] for place in row] for row in rows],
        "logprob_token_ids": [[[i for i, _ in place] for place in row] for row in rows],
    }


def _prompts(given: list[Any]) -> list[Any]:
    if not all(isinstance(prompt, str) or is_ids(prompt) for prompt in given):
        raise BadRequest("prompts must be texts, or lists of token ids")
    return given


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def number(value: float) -> float | None:
    return None if math.isnan(value) else value


def tokens_of(choice: Body, logprobs: int) -> list[list[tuple[int, float]]]:
    """Return for each token of a choice its (id, log-prob), and those of the `logprobs` likeliest, likeliest first."""
    content, out = (choice.get("logprobs") or {}).get("content") or [], []  # an answer without a token has neither
    for token, entry in zip(choice["token_ids"], content, strict=True):
        top = sorted(((_id(t), float(t["logprob"])) for t in entry.get("top_logprobs") or ()), key=lambda t: -t[1])
        best = dict(top[:logprobs]) | {token: float(entry["logprob"])}
        out.append(sorted(best.items(), key=lambda item: -item[1]))
    return out


def _id(entry: Body) -> int:
    """Return the token of an entry, in the form of vLLM 0.32 and the embedded engine, or of vLLM 0.26."""
    return int(entry["token_id"] if "token_id" in entry else entry["token"].removeprefix(TOKEN))


# ---- scoring of whole sequences --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """A request to /get_sequence_logprobs/: the `top` likeliest tokens at each place after the prompt."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    top: int
    params: Body
    binary: bool

    @classmethod
    def of(cls, body: Body) -> Scoring:
        """Read a request. Raises BadRequest."""
        sequences, lengths = of_type(body, "sequences", list), of_type(body, "prompt_lengths", list)
        if not all(map(is_ids, sequences)) or not is_ids(lengths) or len(sequences) != len(lengths):
            raise BadRequest("sequences must be lists of token ids, and prompt_lengths a whole number for each")
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if not 0 <= length <= len(sequence):
                raise BadRequest(f"prompt_lengths[{i}] is {length}, but the sequence has {len(sequence)} tokens")
        top, form = of_type(body, "top_logprobs", int, 100), body.get("response_format", "json")
        if top < 1:
            raise BadRequest(f"top_logprobs must be above 0, got {top}")
        if form not in ("json", "binary"):
            raise BadRequest(f'response_format must be "json" or "binary", not {form!r}')
        params = {"max_tokens": 1, "temperature": body.get("temperature", 1.0), "prompt_logprobs": top}
        return cls(sequences, lengths, top, params, form == "binary")

    def answer(self, answers: Sequence[Body]) -> Body:
        rows = [
            [ranked(entry) for entry in answer["prompt_logprobs"][length:]]
            for answer, length in zip(answers, self.prompt_lengths, strict=True)
        ]
        return self._arrays(rows) if self.binary else _columns(rows)

    def _arrays(self, rows: list[list[list[tuple[int, float]]]]) -> Body:
        """Return base64 of arrays padded with -inf: float32 [sequences, places, top], and of each place's own token."""
        shape = len(rows), max(map(len, rows), default=0), self.top
        scores, ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
        own_scores, own_ids = np.full((*shape[:2], 1), -np.inf, np.float32), np.zeros((*shape[:2], 1), np.int32)
        for i, (row, sequence, length) in enumerate(zip(rows, self.sequences, self.prompt_lengths, strict=True)):
            for t, (own, place) in enumerate(zip(sequence[length:], row, strict=True)):
                for k, (token, score) in enumerate(place[: self.top]):
                    scores[i, t, k], ids[i, t, k] = score, token
                if own in (known := dict(place)):
                    own_scores[i, t, 0], own_ids[i, t, 0] = known[own], own
        for array in (scores, own_scores):
            array[np.isnan(array)] = -np.inf
        arrays = {"logprobs": scores, "token_ids": ids, "actual_logprobs": own_scores, "actual_token_ids": own_ids}
        encoded = {f"{name}_b64": base64.b64encode(a.tobytes()).decode("ascii") for name, a in arrays.items()}
        return {**encoded, "shape": list(shape), "completion_lengths": [len(row) for row in rows]}


def ranked(entry: Body | None) -> list[tuple[int, float]]:
    """Return token ids and log-probs of one place of a prompt, by rank; empty at its first token."""
    items = sorted((entry or {}).items(), key=lambda item: item[1]["rank"])
    return [(int(token), float(value["logprob"])) for token, value in items]


# ---- TRL >= 1.11: OpenAI's routes with token ids ---------------------------------------------------------------------


def is_translated(body: Body) -> bool:
    """Return whether a request to OpenAI's routes needs ids or scores, as TRL's do; others go on unchanged."""
    return not body.get("stream") and bool(body.get("return_token_ids") or body.get("prompt_logprobs") is not None)


def completion_prompts(body: Body) -> list[Any]:
    """Read the prompts. Raises BadRequest."""
    prompt = body.get("prompt")
    return _prompts(prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt])


def completion_asked(body: Body) -> Asked:
    """Read the parameters. Raises BadRequest."""
    if body.get("echo"):
        raise BadRequest("echo: an answer with token ids does not repeat its prompt, whose ids are in prompt_token_ids")
    return Asked.of({"max_tokens": 16} | {name: value for name, value in body.items() if name not in ANSWER})


def chat_asked(body: Body) -> Asked:
    """Read the parameters. Raises BadRequest."""
    if body.get("chat_template") is not None:
        raise BadRequest("chat_template: a request cannot have its own template; the served model's is used")
    if body.get("tools") and (choice := body.get("tool_choice")) not in (None, "none"):
        raise BadRequest(
            f"tool_choice={choice!r}: calls of tools are not read from an answer with token ids; "
            'use "none", and read them from its text'
        )
    given = {name: value for name, value in body.items() if name not in CHAT}
    given["max_tokens"] = given.pop("max_completion_tokens", None) or given.get("max_tokens")
    given["logprobs"] = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return Asked.of(given)


def completion_choice(prompt: list[int], answer: Body, choice: Body, asked: Asked, name: Namer) -> Body:
    """Return a choice of /v1/completions without its text; `name` makes the text of a token."""
    logprobs = None
    if asked.logprobs is not None:
        tokens = tokens_of(choice, asked.logprobs)
        logprobs = {
            "text_offset": [],
            "tokens": [name(i) for i in choice["token_ids"]],
            "token_logprobs": [number(dict(t)[i]) for t, i in zip(tokens, choice["token_ids"], strict=True)],
            "top_logprobs": [{name(i): number(lp) for i, lp in token} for token in tokens],
        }
    more = {"prompt_logprobs": answer["prompt_logprobs"]} if answer.get("prompt_logprobs") is not None else {}
    return {"logprobs": logprobs, "prompt_token_ids": prompt, **more}


def chat_choice(choice: Body, asked: Asked, name: Namer) -> Body:
    """Return a choice of /v1/chat/completions without its text; `name` makes the text of a token."""
    if asked.logprobs is None:
        return {"logprobs": None}

    def shown(token: int, score: float) -> Body:
        return {"token": name(token), "logprob": number(score), "bytes": None}

    tokens = zip(choice["token_ids"], tokens_of(choice, asked.logprobs), strict=True)
    content = [
        shown(i, dict(top)[i]) | {"top_logprobs": [shown(*one) for one in top[: asked.logprobs]]} for i, top in tokens
    ]
    return {"logprobs": {"content": content}}


def openai_answer(model: str, chat: bool, prompts: Sequence[list[int]], choices: list[Body]) -> Body:
    """Return the answer of /v1/completions, or of /v1/chat/completions (`chat`, with one prompt)."""
    read, made = sum(map(len, prompts)), sum(len(choice["token_ids"]) for choice in choices)
    kind, name = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
    head = {"id": f"{name}-{random.getrandbits(128):032x}", "object": kind, "created": int(time.time())}
    usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    more = {"prompt_token_ids": prompts[0]} if chat else {}
    return {**head, "model": model, "choices": choices, "usage": usage, **more}

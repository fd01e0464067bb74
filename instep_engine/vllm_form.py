"""The form of vLLM's first server at `/generate`, over `/inference/v1/generate`. Atropos' environments use it.

SGLang's form (`sglang_form.py`) has the same route, and no `prompt`; `read` and `reply_of` are for both.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from instep_engine import sglang_form

DEFAULT_TOKENS = 16  # as in vLLM's SamplingParams
FINAL_ONLY = 2  # vLLM's `output_kind`: without it vLLM 0.26 only answers with those of `n` responses that end last
LONGEST_HEADER = 4000  # characters
_KEY = "vllm_form"  # in the header: the sampling parameters of a request that came through a router


def is_asked(body: Any, header: str | None = None) -> bool:
    """Return whether a request to `/generate` has this form, or had it before `for_router`."""
    return isinstance(body, dict) and ("prompt" in body or (header is not None and f'"{_KEY}"' in header))


def for_router(body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the request in SGLang's form, which vllm-router knows, and the header `HEADER` with the rest.

    Raises:
        ValueError: it asks for something that is not supported.
    """
    asked = Asked.read(body)
    prompt = {"input_ids": asked.ids} if asked.text is None else {"text": asked.text}
    header = json.dumps({_KEY: asked.params})
    if len(header) > LONGEST_HEADER:
        raise ValueError(f"sampling parameters of {len(header)} characters; use at most {LONGEST_HEADER}")
    return prompt, header


@dataclass(frozen=True)
class Asked:
    """A request for `n` responses to one prompt.

    Attributes:
        text, ids: the prompt, in one of the two forms.
        params: vLLM's sampling parameters.
    """

    text: str | None
    ids: list[int] | None
    params: dict[str, Any] = field(default_factory=dict)
    adds_special_tokens: ClassVar[bool] = True

    @classmethod
    def read(cls, body: Mapping[str, Any], header: str | None = None) -> Asked:
        """Read a request from its JSON, and from the header if it came through a router.

        Raises:
            ValueError: it asks for something that is not supported.
        """
        if "prompt" in body:
            prompt, params = body["prompt"], {name: value for name, value in body.items() if name != "prompt"}
        else:
            prompt, rest = body.get("text", body.get("input_ids")), json.loads(header or "{}")
            if not isinstance(rest, dict) or not isinstance(rest.get(_KEY), dict):
                raise ValueError(f"the header has no {_KEY}, an object of sampling parameters")
            params = rest[_KEY]
        if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
            prompt = prompt["prompt_token_ids"]
        elif not isinstance(prompt, (str, list)):
            raise ValueError('prompt must be {"prompt_token_ids": [...]} or a text')
        if params.pop("stream", None):
            raise ValueError("stream: this route does not stream; use /v1/completions")
        text = prompt if isinstance(prompt, str) else None
        return cls(text, None if isinstance(prompt, str) else prompt, params)

    @property
    def skip_special_tokens(self) -> bool:
        return self.params.get("skip_special_tokens") is not False

    def payload(self, ids: list[int]) -> dict[str, Any]:
        """Return the request for vLLM's route; `ids` are those of the prompt."""
        given = {name: value for name, value in self.params.items() if value is not None}
        own = {"detokenize": bool(given.get("stop")), "output_kind": FINAL_ONLY}
        return {"token_ids": ids, "sampling_params": {"max_tokens": DEFAULT_TOKENS, **given, **own}}

    @staticmethod
    def shown(answer: Mapping[str, Any]) -> list[list[int]]:
        """Return the tokens of each response, from the answer of vLLM's route."""
        return [list(choice.get("token_ids") or []) for choice in answer["choices"]]

    def reply(self, ids: Sequence[int], answer: Mapping[str, Any], prompt: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return the answer in this form.

        Args:
            answer: of vLLM's route; prompt, texts: the decoded tokens of the prompt and of `shown`.
        """
        choices = answer["choices"]
        out: dict[str, Any] = {
            "text": [self._cut(text, choice) for text, choice in zip(texts, choices, strict=True)],
            "prompt": prompt,
            "finish_reasons": [choice.get("finish_reason") for choice in choices],
        }
        if self.params.get("logprobs") is not None:
            out["logprobs"] = [_log_probs(choice) for choice in choices]
            out |= {"prompt_token_ids": list(ids), "token_ids": self.shown(answer)}
        if self.params.get("prompt_logprobs") is not None:
            entries = answer.get("prompt_logprobs") or [None] * len(ids)
            out["prompt_logprobs"] = [
                None if entry is None else {token: one["logprob"] for token, one in entry.items()} for entry in entries
            ]
        return out

    def _cut(self, text: str, choice: Mapping[str, Any]) -> str:
        """Return the text before the stop string that ended it."""
        stop = choice.get("stop_reason")
        if isinstance(stop, str) and not self.params.get("include_stop_str_in_output") and stop in text:
            return text[: text.rindex(stop) if self.params.get("min_tokens") else text.index(stop)]
        return text


def _log_probs(choice: Mapping[str, Any]) -> list[list[dict[str, float]]]:
    """Return [token] lists of one {id: log-prob}: the sampled token first, then the requested most likely ones."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    out = []
    for token, entry in zip(choice.get("token_ids") or [], entries, strict=False):
        known = {str(token): entry["logprob"]}
        for other in entry.get("top_logprobs") or []:
            name = other["token_id"] if "token_id" in other else str(other["token"]).removeprefix("token_id:")
            known.setdefault(str(name), other["logprob"])
        out.append([known])
    return out


# ---- both forms ------------------------------------------------------------------------------------------------------


def read(body: Any, header: str | None) -> Asked | sglang_form.Asked:
    """Read a request to `/generate`, in one of the two forms. Raises ValueError: it asks for something unsupported."""
    return (Asked if is_asked(body, header) else sglang_form.Asked).read(body, header)


async def reply_of(
    asked: Asked | sglang_form.Asked,
    ids: Sequence[int],
    answer: Mapping[str, Any],
    seconds: float,
    decode: Callable[[Sequence[int], bool], Awaitable[str]],
) -> dict[str, Any]:
    """Return the answer in the form of the request.

    Args:
        ids: of the prompt; answer: of vLLM's route.
        decode: makes the text of tokens, without special tokens or with them.
    """
    skip = asked.skip_special_tokens
    if isinstance(asked, sglang_form.Asked):
        return asked.reply(ids, answer, await decode(asked.shown(answer), skip), seconds)
    texts = [await decode(tokens, skip) for tokens in asked.shown(answer)]
    return asked.reply(ids, answer, await decode(ids, False) if asked.text is None else asked.text, texts)

"""The form of SGLang's `/generate`, over vLLM's `/inference/v1/generate`. Functions written for slime use it.

A server reads a request (`Asked.read`), answers its `payload` by its own route, decodes the `shown` tokens, and sends
the `reply`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

PATH = "/generate"
HEADER = "x-instep-request"  # repeats, as JSON, what vllm-router drops from a body of this form, such as a seed
MORE_LABEL = "instep"  # one of SGLang's `custom_labels`: as JSON, what sglang-router drops from a body of this form
DEFAULT_TOKENS = 128  # as in SGLang
VLLM_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = frozenset(
    "max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop stop_token_ids ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim n".split()
)
_KEYS = frozenset("text input_ids sampling_params return_logprob logprob_start_len rid".split())


@dataclass(frozen=True)
class Asked:
    """A request, for one response.

    Attributes:
        text, ids: the prompt, in one of the two forms.
        params: the sampling parameters under vLLM's names.
        log_probs, prompt_log_probs: which log-probs are requested.
        whole: the text holds all tokens. SGLang cuts the end-of-turn token and a stop string from the text unless
            `no_stop_trim` is true. Here this happens only if it is false, because slime's requests set it.
        num_tokens: the most tokens of the response; 0 to score the prompt.
    """

    text: str | None
    ids: list[int] | None
    params: dict[str, Any] = field(default_factory=dict)
    log_probs: bool = False
    prompt_log_probs: bool = False
    whole: bool = True
    num_tokens: int | None = None
    rid: str = ""
    adds_special_tokens: ClassVar[bool] = False  # slime's functions tokenize without them

    @classmethod
    def read(cls, body: Any, header: str | None = None) -> Asked:
        """Read a request from its JSON, and from the header `HEADER`.

        Raises:
            ValueError: it asks for something that is not supported.
        """
        if header and isinstance(body, dict) and isinstance(more := json.loads(header), dict):
            both = [x.get("sampling_params") or {} for x in (body, more)]
            body = {**body, **more, "sampling_params": {**both[0], **both[1]}}
        given = body.get("sampling_params") or {} if isinstance(body, dict) else None
        if not isinstance(given, dict):
            raise ValueError("the body, and sampling_params in it, must be JSON objects")
        given = {VLLM_NAMES.get(name, name): value for name, value in given.items()}
        _refuse_unknown("sampling_params", given, _SAMPLING)
        _refuse_unknown("the request", body, _KEYS)
        text, ids = body.get("text"), body.get("input_ids")
        if (type(text), ids) != (str, None) and (text, type(ids)) != (None, list):
            raise ValueError("only one prompt per request: give text, a string, or input_ids, a list of integers")
        if given.get("n") not in (None, 1) or body.get("logprob_start_len") not in (None, -1, 0):
            raise ValueError("n must be 1, logprob_start_len -1 (only the response) or 0 (the prompt, too)")
        num = given.get("max_tokens", DEFAULT_TOKENS)
        asked = bool(body.get("return_logprob"))
        whole = given.get("no_stop_trim") is not False
        own = ("n", "no_stop_trim", "spaces_between_special_tokens", "max_tokens")
        params = {name: value for name, value in given.items() if name not in own and value is not None}
        rest: dict[str, Any] = {"whole": whole, "num_tokens": num, "rid": str(body.get("rid") or "")}
        return cls(text, ids, params, asked, asked and body.get("logprob_start_len") == 0, **rest)

    @property
    def skip_special_tokens(self) -> bool:
        return self.params.get("skip_special_tokens") is not False

    def payload(self, ids: list[int]) -> dict[str, Any]:
        """Return the request for vLLM's route; `ids` are those of the prompt."""
        params = {**self.params, "logprobs": 0, "detokenize": bool(self.params.get("stop")), "output_kind": 2}
        if self.num_tokens is not None:
            params["max_tokens"] = self.num_tokens or 1  # to score a prompt, one token is made and dropped
        if self.prompt_log_probs:
            params["prompt_logprobs"] = 0
        return {"token_ids": ids, "sampling_params": params}

    def shown(self, answer: Mapping[str, Any]) -> list[int]:
        """Return the tokens of the response's text, from the answer of vLLM's route."""
        choice, tokens = answer["choices"][0], self._tokens(answer)
        ended = choice.get("finish_reason") == "stop" and not self.whole and not self._stops
        return tokens[:-1] if ended else tokens

    def reply(self, ids: Sequence[int], answer: Mapping[str, Any], text: str, seconds: float) -> dict[str, Any]:
        """Return SGLang's answer.

        Args:
            answer: of vLLM's route; text: the decoded `shown` tokens.
        """
        choice, tokens = answer["choices"][0], self._tokens(answer)
        ends = sorted((text.find(stop), stop) for stop in self._stops if stop in text)
        kind = choice.get("finish_reason") or "stop"
        reason: dict[str, Any] = {"type": kind}
        if kind == "stop":
            matched = choice.get("stop_reason") or (ends[0][1] if ends else tokens[-1] if tokens else None)
            reason["matched"] = matched
            text = text[: ends[0][0]] if ends and not self.whole else text
        elif kind == "length":
            reason["length"] = len(tokens)
        else:
            reason |= {"type": "abort", "message": f"the engine has ended the request: {kind}"}
        meta = {"id": self.rid or answer.get("request_id", ""), "finish_reason": reason, "prompt_tokens": len(ids)}
        meta |= {"completion_tokens": len(tokens), "e2e_latency": seconds}
        if versions := choice.get("weight_versions"):  # of each token; SGLang has one version for all
            meta |= {"weight_version": str(versions[-1]["version"]), "weight_versions": versions}
        if self.log_probs:
            scores = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
            meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(scores, tokens, strict=False)]
        if self.prompt_log_probs:
            entries = answer.get("prompt_logprobs") or [None] * len(ids)
            scores = [entry[str(i)]["logprob"] if entry else None for entry, i in zip(entries, ids, strict=True)]
            meta["input_token_logprobs"] = [[p, token, None] for p, token in zip(scores, ids, strict=True)]
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    @property
    def _stops(self) -> list[str]:
        stop = self.params.get("stop") or []
        return [stop] if isinstance(stop, str) else list(stop)

    def _tokens(self, answer: Mapping[str, Any]) -> list[int]:
        return [] if self.num_tokens == 0 else list(answer["choices"][0].get("token_ids") or [])


def repeated(body: Mapping[str, Any]) -> str:
    """Return the header `HEADER` of a request: its short parts as JSON, without prompt and stop strings."""
    given = {n: v for n, v in (body.get("sampling_params") or {}).items() if n not in ("stop", "stop_token_ids")}
    rest = {name: value for name, value in body.items() if name not in ("text", "input_ids", "sampling_params")}
    return json.dumps({**rest, "sampling_params": given})


def _refuse_unknown(where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise a ValueError for unsupported keys, unless their value is null or false."""
    if unknown := sorted(name for name, value in given.items() if name not in known and value not in (None, False, -1)):
        raise ValueError(f"{where} has {', '.join(unknown)}, which is not supported; known: {', '.join(sorted(known))}")

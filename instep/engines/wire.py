"""The wire format of a kind of engine: the JSON of requests for responses and for log-probs, and of their answers.

`WireFormat` is vLLM's, token ids in and token ids out; a kind with another format overrides its methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from instep.errors import EngineError
from instep.models import routes
from instep.types import Status, VersionSpan

GENERATE = "/inference/v1/generate"
FINAL_ONLY = 2  # vLLM's `output_kind`: whole responses only; without it 0.26 loses all but one of n
# Sends the JSON of one request. Returns the JSON of its answer and, if the engine does not say it itself, the
# weight version of all its tokens.
Send = Callable[[dict[str, Any]], Awaitable[tuple[Any, str | None]]]
# The remedy for an answer in another form than vLLM's.
_OTHER_FORM = "see the engine's log, and compare its version with docs/engines.md"


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response to the prompt `token_ids`.

    Attributes:
        url: its address; model: the name of the model there ("": the only one).
        sampling_params: the sampling parameters under vLLM's names.
        session: the router sends requests of one session to one engine if it can.
    """

    url: str
    model: str
    token_ids: Sequence[int]
    sampling_params: dict[str, Any]
    session: str = ""


@dataclass
class Completion:
    """One response as an engine returned it."""

    token_ids: list[int]
    log_probs: list[float] | None  # of the sampled tokens, under the processed distribution
    weight_versions: list[VersionSpan]  # empty if they are unknown
    finish_reason: str
    stop_reason: int | str | None
    routed_experts: np.ndarray | None = None  # `[num_tokens, num_layers, top_k]`, if the engine returns them

    @property
    def status(self) -> Status:
        if self.finish_reason == "length":
            return Status.TRUNCATED
        return Status.ABORTED if self.finish_reason in ("abort", "cancelled") else Status.COMPLETED

    def ended(self, num_tokens: int, stop: str) -> Completion:
        """Return the engine's answer if it had stopped at the string `stop` after `num_tokens` tokens."""
        lost, experts = len(self.token_ids) - num_tokens, self.routed_experts
        spans = [replace(s, end=min(s.end, num_tokens)) for s in self.weight_versions if s.start < num_tokens]
        log_probs = None if self.log_probs is None else self.log_probs[:num_tokens]
        experts = None if experts is None else experts[: len(experts) - lost]
        return Completion(self.token_ids[:num_tokens], log_probs, spans, "stop", stop, experts)


class WireFormat:
    """The format of vLLM's `/inference/v1/generate`."""

    generate_route = GENERATE
    abort_route = "/abort_requests"  # POST: the engine ends all its requests, which return their tokens

    async def complete_n(self, request: GenerationRequest, n: int, send: Send) -> list[Completion]:
        """Return `n` responses by one request. Response i is sampled with `seed + i`, as if it were a separate request.

        The log-probs of the sampled tokens are always requested. Text is requested only if the engine looks for stop
        strings.

        Raises:
            EngineError: the parts of an answer do not fit together; also the errors of `send`.
        """
        given = request.sampling_params
        own = {"logprobs": 0, "detokenize": bool(given.get("stop")), "output_kind": FINAL_ONLY}
        sampling_params = own | given | ({"n": n} if n > 1 else {})
        named = {"model": request.model} if request.model else {}
        payload = {**named, "token_ids": list(request.token_ids), "sampling_params": sampling_params}
        answer, version = await send(payload)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            what = f"the answer does not have the form of {n} choices: {answer!r:.200}"
            raise EngineError(what, where=request.url, remedy=_OTHER_FORM)
        return [_completion(choice, request.url, version) for choice in choices]

    def scoring_request(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the JSON that requests the log-probs of `tokens` at temperature 1, as log-probs of a prompt."""
        sampling_params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return {"token_ids": list(tokens), "sampling_params": sampling_params}

    def prompt_log_probs(self, answer: dict[str, Any], tokens: Sequence[int], where: str) -> list[float]:
        """Read log-probs of the second to the last of `tokens` from an answer, each given those before it.

        Args:
            where: the engine that answered, for errors.

        Raises:
            EngineError: the answer has no log-probs, or they are of other tokens.
        """
        try:
            entries = answer["prompt_logprobs"]
            if len(entries) != len(tokens):
                raise ValueError(f"{len(entries)} log-probs of {len(tokens)} tokens")
            return [float(e[str(token)]["logprob"]) for e, token in zip(entries[1:], tokens[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            what = f"no log-probs of the tokens that were sent: {error!r}"
            raise EngineError(what, where=where, remedy="see its log") from error


VLLM_WIRE = WireFormat()


def _completion(choice: dict[str, Any], url: str, version: str | None) -> Completion:
    """Return one checked choice of an answer; `version` is that of all tokens if the engine does not say it."""
    try:
        ids = choice.get("token_ids") or []
        log_probs = choice.get("log_probs")  # plain numbers, in an answer in arrays (answers.py)
        if log_probs is None:
            ids = list(map(int, ids))
            content = (choice.get("logprobs") or {}).get("content")
            log_probs = None if content is None and ids else [float(x["logprob"]) for x in content or []]
        told = choice.get("weight_versions") or []
        spans = [VersionSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in told]
        if not spans and version is not None:
            spans = [VersionSpan(version, 0, len(ids))]
        experts = choice.get("routed_experts")
        experts = routes.decode(experts) if isinstance(experts, str) else experts
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"a choice of another form: {error!r}; {choice!r:.200}"
        raise EngineError(what, where=url, remedy=_OTHER_FORM) from error
    if log_probs is not None and len(log_probs) != len(ids):
        raise EngineError(f"{len(ids)} tokens came with {len(log_probs)} log-probs", where=url, remedy=_OTHER_FORM)
    check_spans(spans, len(ids), url)
    return Completion(
        ids,
        log_probs,
        spans if ids else [],
        choice.get("finish_reason") or "stop",
        choice.get("stop_reason"),
        experts if ids else None,
    )


def check_spans(spans: list[VersionSpan], num_tokens: int, url: str) -> None:
    """Raise EngineError if there are spans, and they do not cover the tokens one after the other."""
    if num_tokens and spans and [s.start for s in spans] + [num_tokens] != [0] + [s.end for s in spans]:
        raise EngineError(f"version spans {spans} do not cover {num_tokens} tokens", where=url, remedy=_OTHER_FORM)

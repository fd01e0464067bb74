"""The wire format of the kind in `third_kind.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from instep.engines.wire import Completion, GenerationRequest, Send, WireFormat
from instep.types import VersionSpan


class ThirdWire(WireFormat):
    """Answers are JSON in JSON, and scores a plain list."""

    generate_route, abort_route = "/third/generate", "/third/end_all"

    async def complete_n(self, request: GenerationRequest, n: int, send: Send) -> list[Completion]:
        how = {"logprobs": 0, **request.sampling_params, **({"n": n} if n > 1 else {})}
        answer, _ = await send({"ids": list(request.token_ids), "how": how})
        return [_completion(one) for one in json.loads(answer["responses"])]

    def scoring_request(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"ids": list(tokens), "how": {"max_tokens": 1, "prompt_logprobs": 0}}

    def prompt_log_probs(self, answer: dict[str, Any], tokens: Sequence[int], where: str) -> list[float]:
        scores: list[float] = answer["scores"]
        assert len(scores) == len(tokens) - 1
        return scores


def _completion(one: dict[str, Any]) -> Completion:
    log_probs = [entry["logprob"] for entry in one["logprobs"]["content"]]
    spans = [VersionSpan(s["version"], s["start"], s["end"]) for s in one["weight_versions"]]
    return Completion(one["token_ids"], log_probs, spans, one["finish_reason"], None)

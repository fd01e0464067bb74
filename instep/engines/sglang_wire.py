"""The wire format of SGLang's `/generate`."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from instep.engines.kind import config_json
from instep.engines.wire import Completion, GenerationRequest, Send, WireFormat, check_spans
from instep.errors import EngineError
from instep.models import routes
from instep.types import VersionSpan
from instep_engine.sglang_form import PATH, VLLM_NAMES

SGLANG_NAMES = {vllm: sglang for sglang, vllm in VLLM_NAMES.items()}
_SAME = frozenset(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids "
    "ignore_eos skip_special_tokens spaces_between_special_tokens logit_bias".split()
)
_STRUCTURED = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
_EXPERTS = "routed_experts_prompt_start"  # vLLM's name; SGLang's is no sampling parameter
_NOT_SENT = ("logprobs", "prompt_logprobs", "detokenize", "include_stop_str_in_output", _EXPERTS)  # about the answers
_IGNORED = (
    ("ignore_eos", "stop_token_ids", "does not end a response at stop_token_ids if ignore_eos is set"),
    ("min_tokens", "stop", "ends a response at a stop string before min_tokens tokens"),
)
_OTHER_FORM = "see the engine's log, and compare its version with docs/engines_sglang.md"


class SglangWire(WireFormat):
    """Token ids in and out."""

    generate_route = PATH

    async def complete_n(self, request: GenerationRequest, n: int, send: Send) -> list[Completion]:
        given, ids = request.sampling_params, list(request.token_ids)
        params = to_sglang(given, request.url)
        payload: dict[str, Any] = {"return_logprob": True, "input_ids": ids, "sampling_params": params}
        if _EXPERTS in given:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": given[_EXPERTS]}
        if n > 1:
            params["n"] = n  # the plugin gives response i the seed `sampling_seed + i`
        answer, version = await send(payload)
        answers = answer if n > 1 else [answer]
        if not isinstance(answers, list) or len(answers) != n:
            what = f"the answer does not have the form of {n} responses"
            raise EngineError(what, where=request.url, remedy=_OTHER_FORM)
        return [_completion(one, request, version) for one in answers]

    def scoring_request(self, tokens: Sequence[int]) -> dict[str, Any]:
        params = {"max_new_tokens": 0, "temperature": 1.0}
        return {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}

    def prompt_log_probs(self, answer: dict[str, Any], tokens: Sequence[int], where: str) -> list[float]:
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            if len(entries) != len(tokens) or not all(
                entry[1] in (token, 0) for entry, token in zip(entries, tokens, strict=True)
            ):  # SGLang writes 0 for the last id of the vocabulary
                raise ValueError(f"{len(entries)} log-probs of {len(tokens)} tokens, or of other tokens")
            return [math.nan if entry[0] is None else float(entry[0]) for entry in entries[1:]]  # JSON has no NaN
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"no log-probs of the tokens that were sent: {error!r}"
            raise EngineError(what, where=where, remedy="see its log") from error


SGLANG_WIRE = SglangWire()


def to_sglang(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return SGLang's sampling parameters for those of `given`, which have vLLM's names.

    Without `max_tokens` a response may fill the context, as with vLLM; SGLang's own default is 128.

    Raises:
        EngineError: SGLang has no such parameter, or it would ignore one of two.
    """
    for one, other, why in _IGNORED:
        if given.get(one) and given.get(other):
            raise EngineError(f"SGLang {why}", where=where, remedy=f"remove {one} or {other}")
    out: dict[str, Any] = {"max_new_tokens": None, "no_stop_trim": True}
    for name, value in given.items():
        if name in _SAME or name in SGLANG_NAMES:
            out[SGLANG_NAMES.get(name, name)] = value
        elif name == "extra_args":
            out["custom_params"] = value
        elif name == "structured_outputs" and set(value) <= set(_STRUCTURED):
            out |= {_STRUCTURED[kind]: form for kind, form in value.items()}
        elif name not in _NOT_SENT:
            what, remedy = f"SGLang has no sampling parameter {name!r}", "remove it, or use --rollout-backend vllm"
            raise EngineError(what, where=where, remedy=remedy)
    return out


def _completion(answer: Any, request: GenerationRequest, version: str | None) -> Completion:
    """Return one checked response; `version` is that of all tokens if the engine does not say it."""
    given, url = request.sampling_params, request.url
    try:
        ids, meta = list(map(int, answer["output_ids"])), answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        log_probs = [float(entry[0]) for entry in entries]
        if [int(entry[1]) for entry in entries] != ids:
            raise ValueError(f"{len(ids)} tokens came with log-probs of {len(entries)} others")
        spans = [VersionSpan(str(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions") or []]
        if not spans:  # below 0.5.19 the answer has the label of its end, and no request is under way when it changes
            spans = [VersionSpan(str(meta["weight_version"]) if version is None else version, 0, len(ids))]
        reason = meta["finish_reason"]
        matched = reason.get("matched")
        stop = matched if isinstance(matched, str) or matched in (given.get("stop_token_ids") or ()) else None
        experts = None
        if ids and (text := meta.get("routed_experts")) is not None:
            num_rows = len(request.token_ids) + len(ids) - 1 - given[_EXPERTS]
            flat = np.frombuffer(base64.b64decode(text), np.int32)
            experts = routes.as_routes(flat.reshape(num_rows, -1, _experts_per_token(request.model)))
        kind = str(reason["type"])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"a response of another form: {error!r}; {answer!r:.200}"
        raise EngineError(what, where=url, remedy=_OTHER_FORM) from error
    check_spans(spans, len(ids), url)
    return Completion(ids, log_probs, spans if ids else [], kind, stop, experts)


@functools.cache
def _experts_per_token(model: str) -> int:
    return int(config_json(model)["num_experts_per_tok"])

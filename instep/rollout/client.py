"""The engine client: a request with token ids in and out, and the abort of all requests of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.sampling import note_request
from instep.engines.kind import kind_of
from instep.engines.wire import GENERATE, VLLM_WIRE, Completion, GenerationRequest, WireFormat
from instep.errors import ConfigError, EngineError, RolloutError
from instep.rollout.http import SESSION_HEADER, post, post_json
from instep.rollout.request_gate import gate
from instep.system import spans
from instep_engine.answers import CONTENT_TYPE
from instep_engine.sglang_form import VLLM_NAMES

MAX_RETRIES = 8  # 21 seconds: time for other engines to take over the requests of a dead one

_VLLM_NAMES = frozenset(
    "max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop stop_token_ids bad_words ignore_eos logprobs prompt_logprobs skip_special_tokens "
    "spaces_between_special_tokens include_stop_str_in_output detokenize logit_bias allowed_token_ids extra_args "
    "structured_outputs".split()
)


def get_model_url(args: HookSettings, model_name: str | None = None, endpoint: str = GENERATE) -> str:
    """Return the URL of `endpoint` at the router of `model_name` (of `--vllm-config`); None: at the only router.

    Raises:
        ConfigError: no model of that name is served.
    """
    ip, port = args.vllm_router_ip, args.vllm_router_port
    if model_name is not None:
        routers = args.vllm_model_routers or {}
        if model_name not in routers:
            raise ConfigError(
                f"no model {model_name!r} is served", where="--vllm-config", remedy=f"known: {sorted(routers)}"
            )
        ip, port = routers[model_name]
    host = f"[{ip}]" if ":" in str(ip) else ip
    return f"http://{host}:{port}{endpoint}"


def to_vllm(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Translate sampling parameters from the names of slime and vime (`max_new_tokens`, ...); None means "not set".

    Raises:
        RolloutError: a name that vLLM does not know, or two spellings with different values.
    """
    out: dict[str, Any] = {}
    for name, value in sampling_params.items():
        new = VLLM_NAMES.get(name, name)
        if new not in _VLLM_NAMES:
            raise RolloutError(
                f"unknown sampling parameter {name!r}", where="sampling_params", remedy=f"known: {sorted(_VLLM_NAMES)}"
            )
        if value is None:
            continue
        if out.get(new, value) != value:
            raise RolloutError(
                f"{name!r} = {value!r} contradicts {new!r} = {out[new]!r}", where="sampling_params", remedy="set one"
            )
        out[new] = value
    return out


def wire_of(args: HookSettings) -> WireFormat:
    """Return the wire format of the policy's engines."""
    return kind_of(args.rollout_engine_kind).wire


async def complete(
    url: str, model: str, token_ids: Sequence[int], sampling_params: dict[str, Any], **how: Any
) -> Completion:
    """Return one response to `token_ids`; `how` are keywords of `complete_n`."""
    return (await complete_n(url, model, token_ids, sampling_params, 1, **how))[0]


async def complete_n(
    url: str,
    model: str,
    token_ids: Sequence[int],
    sampling_params: dict[str, Any],
    n: int,
    *,
    wire: WireFormat = VLLM_WIRE,
    timeout: float = 3600.0,
    max_retries: int = 4,
    session: str = "",
    arrays: bool = True,
) -> list[Completion]:
    """Return `n` responses to `token_ids` by one request, with the log-probs of their tokens.

    Response i has `seed + i`. If an engine dies, its request is sent again, and the router gives it to another engine.
    An engine that runs fewer than `n` requests at once (--vllm-max-num-seqs) gets one request per response.

    Args:
        sampling_params: with vLLM's names.
        max_retries: as in `post`.
        session: the requests of one session (those of a group) go to one engine, if the router supports it.
        arrays: whether an engine may answer in arrays (`instep_engine/answers.py`) instead of JSON, if it can.

    Raises:
        EngineError: the request was refused, there was no answer, or its parts do not fit together.
    """
    headers = {SESSION_HEADER: session} if session else {}
    if arrays:
        headers["Accept"] = f"{CONTENT_TYPE}, application/json"

    async def send(payload: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        async with gate().admitted(url):
            answer = await post_json(url, payload, timeout=timeout, max_retries=max_retries, headers=headers)
            return answer, gate().version if gate().guards(url) else None

    request = GenerationRequest(url, model, token_ids, sampling_params, session)
    asked = {"prompt_tokens": len(token_ids)}
    with spans.span("turn", spans.ROLLOUT, lambda: asked):
        try:
            done = await wire.complete_n(request, n, send)
        except EngineError as error:
            if n == 1 or "sampling_params.n" not in error.what:
                raise
            seeds = [{**sampling_params, "seed": sampling_params["seed"] + i} for i in range(n)]
            each = (wire.complete_n(replace(request, sampling_params=params), 1, send) for params in seeds)
            done = [one for (one,) in await asyncio.gather(*each)]
        asked["tokens"] = sum(len(one.token_ids) for one in done)
    if gate().guards(url):
        note_request(sampling_params, [one.token_ids for one in done], token_ids)
    return done


async def abort_all(engine_urls: Sequence[str], wire: WireFormat, *, timeout: float = 10.0) -> None:
    """Ask every engine directly, not through the router, to end all its requests. They return the tokens they have.

    An engine that does not answer is skipped if there are others: it has died, and the controller notices that.
    """
    calls = (post(url + wire.abort_route, {}, max_retries=1, timeout=timeout) for url in engine_urls)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException) and not (isinstance(outcome, EngineError) and len(engine_urls) > 1):
            raise outcome

"""The engine client: one token-in, token-out request in vLLM's format, and the abort that goes to engines directly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep.errors import ConfigError, EngineError, RolloutError
from instep.rollout import admission
from instep.rollout.http import post
from instep.types import Status, VersionSpan

GENERATE = "/inference/v1/generate"
SESSION_HEADER = "x-session-id"  # what vllm-router's sticky and hashing policies look at
FINAL_ONLY = 2  # vLLM's `output_kind`: only the whole responses matter; 0.26 loses all but one of n without it
MAX_RETRIES = 8  # 23 seconds, where other engines can take over what was on a dead one

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_VLLM_NAMES = frozenset(
    "max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop stop_token_ids bad_words ignore_eos logprobs prompt_logprobs skip_special_tokens "
    "spaces_between_special_tokens include_stop_str_in_output detokenize logit_bias allowed_token_ids extra_args "
    "structured_outputs".split()
)


@dataclass
class Completion:
    """What an engine answered for one response."""

    token_ids: list[int]
    log_probs: list[float] | None  # of the sampled tokens, under the processed distribution
    weight_versions: list[VersionSpan]  # empty when nobody can say
    finish_reason: str
    stop_reason: int | str | None

    @property
    def status(self) -> Status:
        if self.finish_reason == "length":
            return Status.TRUNCATED
        return Status.ABORTED if self.finish_reason in ("abort", "cancelled") else Status.COMPLETED


def get_model_url(args: Any, model_name: str | None = None, endpoint: str = GENERATE) -> str:
    """URL of `endpoint` at the router of `model_name` (of `--vllm-config`), or at the one router when it is None.

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
    """The seeds' names (`max_new_tokens`, ...) to vLLM's; None means "not set".

    Raises:
        RolloutError: a name that vLLM does not know, or two spellings with different values.
    """
    out: dict[str, Any] = {}
    for name, value in sampling_params.items():
        new = _RENAMED.get(name, name)
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


async def complete(
    url: str, model: str, token_ids: Sequence[int], sampling_params: dict[str, Any], **options: Any
) -> Completion:
    """One response to `token_ids`; see `complete_n`."""
    return (await complete_n(url, model, token_ids, sampling_params, 1, **options))[0]


async def complete_n(
    url: str,
    model: str,
    token_ids: Sequence[int],
    sampling_params: dict[str, Any],
    n: int,
    *,
    timeout: float = 3600.0,
    max_retries: int = 4,
    session: str = "",
) -> list[Completion]:
    """`n` responses to `token_ids`; `sampling_params` in vLLM's names, always with the sampled tokens' log-probs.

    Response i draws with the seed `seed + i`, as if it had been asked for alone. The engine makes text of the tokens
    only where it has to look for stop strings. A request that is lost with its engine is made again, and the router
    gives it to another one.

    Args:
        max_retries: as in `post`.
        session: requests of one session go to one engine where the router can (the samples of a group, turns).

    Raises:
        EngineError: refused, unreachable, or an answer whose parts do not fit each other.
    """
    payload: dict[str, Any] = {"model": model, "token_ids": list(token_ids)}
    own = {"logprobs": 0, "detokenize": bool(sampling_params.get("stop")), "output_kind": FINAL_ONLY}
    payload["sampling_params"] = own | sampling_params | ({"n": n} if n > 1 else {})
    headers = {SESSION_HEADER: session} if session else None
    async with admission.admitted(url):
        answer = await post(url, payload, timeout=timeout, max_retries=max_retries, headers=headers)
        version = admission.version if admission.is_guarded(url) else None
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != n:
        raise EngineError(f"an answer of another form than {n} choices; it has {sorted(answer)}", where=url)
    return [_completion(choice, url, version) for choice in choices]


def _completion(choice: dict[str, Any], url: str, version: str | None) -> Completion:
    """`version`: of all tokens, where the engine does not say it."""
    try:
        ids = [int(i) for i in choice.get("token_ids") or []]
        content = (choice.get("logprobs") or {}).get("content")
        log_probs = None if content is None and ids else [float(x["logprob"]) for x in content or []]
        spans = [
            VersionSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in choice.get("weight_versions") or []
        ]
        if not spans and version is not None:
            spans = [VersionSpan(version, 0, len(ids))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"a choice of another form: {error!r}; {choice!r:.200}", where=url) from error
    if log_probs is not None and len(log_probs) != len(ids):
        raise EngineError(f"{len(ids)} tokens came with {len(log_probs)} log-probs", where=url)
    if ids and spans and [s.start for s in spans] + [len(ids)] != [0] + [s.end for s in spans]:
        raise EngineError(f"version spans {spans} do not cover {len(ids)} tokens", where=url)
    return Completion(
        ids, log_probs, spans if ids else [], choice.get("finish_reason") or "stop", choice.get("stop_reason")
    )


async def abort_all(engine_urls: Sequence[str], *, timeout: float = 10.0) -> None:
    """Ask every engine, directly, to end all its requests; they answer with what they have (`abort`).

    One that does not answer is passed over: it has died, which is the controller's to notice.
    """
    calls = (post(f"{url}/abort_requests", {}, max_retries=1, timeout=timeout) for url in engine_urls)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException) and not (isinstance(outcome, EngineError) and len(engine_urls) > 1):
            raise outcome

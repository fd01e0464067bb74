"""A group's samples by one request: what the default generate function does, without a task for each sample.

In a large rollout, the controller spends most of its time on tasks, calls and waits around each sample. If no hook sees
single samples, their responses are requested, read and stored together.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.sampling import distribution_of
from instep.engines.stops import find_stop
from instep.engines.wire import Completion
from instep.errors import EngineError
from instep.rollout.client import MAX_RETRIES, complete_n, get_model_url, to_vllm, wire_of
from instep.rollout.execute import DEFAULT_GENERATE
from instep.rollout.outputs import check_sample
from instep.rollout.runtime import gather
from instep.rollout.tokens import decode, prompt_ids
from instep.system.hooks import Hook
from instep.types import Group, Sample, Status

_HOOK = Hook("--custom-generate-function-path", DEFAULT_GENERATE)
GREEDY = 1e-5  # below this temperature vLLM takes the most probable token, and refuses several responses
MAX_TOGETHER = 64  # responses per request


def generate_group(
    args: HookSettings, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Awaitable[None] | None:
    """Generate the responses of samples that have none and differ only in their seed.

    It returns None if one request cannot serve all: their prompts differ, or the engine must get single requests
    because it prefills for others and hands over one response's cache.

    Args:
        sampling_params: with slime's names; `seed` is that of the first sample, and each next sample has the next one.

    Raises:
        EngineError: the engine refused the request, or did not answer.
    """
    params, tokens = to_vllm(sampling_params), prompt_ids(args, group[0])
    if args.no_fast_log_probs or args.prefill_num_servers or args.vllm_config:
        return None
    if params.get("temperature", 1.0) < GREEDY or params.get("max_tokens", 1) <= 0:
        return None
    if any(prompt_ids(args, sample) != tokens for sample in group):
        return None
    for sample in group:
        sample.tokens = list(tokens)
    return _by_one_request(args, group, params, evaluation)


async def _by_one_request(args: HookSettings, group: Group, params: dict[str, Any], evaluation: bool) -> None:
    """Generate a group with vLLM's `params`. Its samples have the tokens of their prompt."""
    params |= experts_wanted(args, group[0], evaluation)
    starts, turn = range(0, len(group), MAX_TOGETHER), distribution_of(params)
    parts = [(group[i], {**params, "seed": params["seed"] + i}, len(group[i : i + MAX_TOGETHER])) for i in starts]
    completions = [one for some in await gather([ask(args, *part) for part in parts]) for one in some]
    for i, (sample, out) in enumerate(zip(group, completions, strict=True)):
        sample.sampling_params = {**params, "seed": params["seed"] + i}
        sample.sampling_turns = [dict(turn)] if out.token_ids else []
        await take(args, sample, params, out, evaluation=evaluation)
        if sample.status is not Status.ABORTED:
            check_sample(sample, _HOOK)


async def ask(args: HookSettings, sample: Sample, params: dict[str, Any], n: int = 1) -> list[Completion]:
    """Return `n` continuations of the tokens of `sample` by the policy's engines; `params` have vLLM's names.

    Raises:
        EngineError: as `complete_n`; it names the place of the sample's prompt in the data.
    """
    wire = wire_of(args)
    try:
        return await complete_n(
            get_model_url(args, endpoint=wire.generate_route),
            str(args.hf_checkpoint),
            sample.tokens,
            params,
            n,
            wire=wire,
            timeout=args.rollout_timeout,
            max_retries=MAX_RETRIES if len(args.rollout_engine_urls) > 1 else 4,
            session=f"group-{sample.group_index}",
            arrays=not args.no_fast_log_probs,
        )
    except EngineError as error:
        if "where" in sample.extra:
            error.where += f", for the prompt of {sample.extra['where']}"
        raise


async def take(
    args: HookSettings, sample: Sample, params: dict[str, Any], out: Completion, *, evaluation: bool
) -> None:
    """Append an engine's completion to `sample`, and set its status and the text of the whole response.

    Args:
        params: those of the request, with vLLM's names.

    Raises:
        EngineError: experts were requested, but are not in the answer.
    """
    if args.use_rollout_routing_replay and out.token_ids and out.routed_experts is None:
        what = "the engine's answer has no routed experts"
        remedy = "start your engines with --enable-return-routed-experts, or remove the flag"
        raise EngineError(what, where="--use-rollout-routing-replay", remedy=remedy)
    experts = None if evaluation else out.routed_experts
    sample.append_plain(out.token_ids, out.log_probs, out.weight_versions, experts)
    sample.status = out.status
    if sample.response_length:
        skip = bool(params.get("skip_special_tokens", True))
        ids = sample.tokens[-sample.response_length :]
        sample.response = await decode(args, ids, skip_special_tokens=skip)
        told = out.stop_reason  # a token, a string, or None if the engine does not report it
        stops = params.get("stop") or [] if told is None else [] if isinstance(told, int) else told
        if out.finish_reason == "stop" and stops:
            stops = [stops] if isinstance(stops, str) else stops
            before_last = await decode(args, ids[:-1], skip_special_tokens=skip)
            if (found := find_stop(sample.response, before_last, stops)) is not None:
                kept = len(found[1]) if params.get("include_stop_str_in_output") else 0
                sample.response = sample.response[: found[0] + kept]


async def ended_at_joint(
    args: HookSettings, sample: Sample, params: dict[str, Any], out: Completion, begun: int
) -> Completion:
    """Cut `out`, which continues `sample`, after the token that completes a stop string begun before it, if any.

    An engine looks for stop strings only in the text of its own answer. As in vLLM, the string that ends first counts.
    If two end together, the first in the list counts. None ends within `min_tokens`.

    Args:
        params: those of the request, with vLLM's names.
        begun: with how many of the last tokens of `sample` an engine has begun the same turn.
    """
    stops, skip = params.get("stop") or [], bool(params.get("skip_special_tokens", True))
    ids = [*sample.tokens[len(sample.tokens) - begun :], *out.token_ids]

    async def length_with(num_tokens: int) -> int:
        text = await decode(args, ids[: begun + num_tokens], skip_special_tokens=skip)
        return len(text.rstrip("\ufffd"))  # half a character is not text yet

    text = await decode(args, ids, skip_special_tokens=skip)
    joint, passed, ends = await length_with(0), await length_with(int(params.get("min_tokens", 0))), []
    for i, stop in enumerate([stops] if isinstance(stops, str) else stops):
        at = text.find(stop, max(0, passed - len(stop) + 1))
        ends += [(at + len(stop), i, stop)] if at >= 0 else []
    end, _, stop = min(ends, default=(0, 0, ""))
    if not end or end - len(stop) >= joint:
        return out
    n = 1
    while n < len(out.token_ids) and await length_with(n) < end:
        n += 1
    return out.ended(n, stop)


def experts_wanted(args: HookSettings, sample: Sample, evaluation: bool) -> dict[str, int]:
    """Return the parameter that names the tokens whose routed experts a request needs; empty without routing replay."""
    if not args.use_rollout_routing_replay:
        return {}
    known = sample.routes_that_hold()  # not all of its routes: vLLM 0.26 exits if the start is behind the prompt
    start = len(sample.tokens) - 1 if evaluation else 0 if known is None else len(known)
    return {"routed_experts_prompt_start": start}

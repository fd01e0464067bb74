"""One group from prompts to rewarded samples: the generate function, the sample hooks and the reward."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instep.errors import DataError, InstepError, RolloutError
from instep.hooks import load_function, raised_at
from instep.rollout.client import to_vllm
from instep.rollout.outputs import DONE, check_sample, flatten
from instep.rollout.rewards.dispatch import apply_rewards
from instep.rollout.runtime import gather
from instep.rollout.tokens import prompt_ids
from instep.types import Group, Sample, Status, name_of

DEFAULT_GENERATE = "instep.rollout.vllm_rollout.generate"
SEEDS = 2**62  # engines take 63 bits; the samples of a group have seeds in a row
CONCURRENCY_PER_ENGINE = 512  # generate functions at work; an engine queues what it cannot run at once
MAX_CONTINUATIONS = 100  # of one sample whose requests others abort (a sync, another rollout's end)


@dataclass
class Execution:
    """What all samples of one rollout or evaluation share."""

    args: Any
    rollout_id: int
    evaluation: bool
    semaphore: asyncio.Semaphore
    reward_key: str | None = None
    max_context_len: int | None = None
    seed_tag: str = ""  # keeps the sampling seeds of evaluation sets apart
    aborted: bool = False  # set once; nothing new is started then
    num_tokens: int = 0


def new_execution(args: Any, rollout_id: int, *, evaluation: bool = False) -> Execution:
    limit = CONCURRENCY_PER_ENGINE * max(1, len(args.rollout_engine_urls))
    slots = asyncio.Semaphore(limit)
    return Execution(args, rollout_id, evaluation, slots, args.reward_key, args.rollout_max_context_len)


def sampling_seed(*parts: int | str | None) -> int:
    """A 62-bit seed from (run seed, group, attempt) or the like, the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % SEEDS


def train_sampling_params(args: Any) -> dict[str, Any]:
    """Sampling parameters of a training rollout, in the seeds' names; those that are not set are left out."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    return {name: value for name, value in params.items() if value is not None}


async def run_group(execution: Execution, group: Group, params: dict[str, Any]) -> Group:
    """Generate and reward all samples of a group; flat, siblings of a fan-out side by side.

    A group with an ABORTED sample has no rewards (the rollout was ended early).
    """
    args = execution.args
    jobs = []
    for i, sample in enumerate(group):
        seed = sampling_seed(f"{execution.seed_tag}{args.rollout_seed}", sample.group_index, sample.attempt)
        jobs.append(run_sample(execution, sample, {**params, "seed": seed + i}))
    out = [leaf for samples in await gather(jobs) for leaf in samples]
    if args.group_rm and not any(s.status is Status.ABORTED for s in out):
        await apply_rewards(args, out, execution.reward_key)
    return out


async def run_sample(execution: Execution, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    """One run of the generate function, then hooks and reward; a list because of fan-out."""
    args = execution.args
    if sample.execution_id is None:
        sample.execution_id = f"{sample.group_index}.{sample.index}.{sample.attempt}"
    if sample.status in DONE and sample.response_length:  # of an earlier rollout, from the buffer
        samples = [sample]
    else:
        async with execution.semaphore:
            if execution.aborted:
                sample.status = Status.ABORTED
                return [sample]
            samples = await _generate(execution, sample, params)
        if any(s.status is Status.ABORTED for s in samples):
            return samples
        samples = [await run_sample_hooks(execution, s) for s in samples]
        execution.num_tokens += sum(s.response_length for s in samples)
    if not args.group_rm:
        await apply_rewards(args, samples, execution.reward_key)
    return samples


async def _generate(execution: Execution, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    args = execution.args
    path = sample.generate_function_path or args.custom_generate_function_path or DEFAULT_GENERATE
    function = load_function(path)
    kwargs = _accepted(path, evaluation=execution.evaluation)
    if execution.max_context_len is not None:
        params = {**params, "max_new_tokens": _room(execution, sample, params.get("max_new_tokens"))}
    sample.sampling_params = to_vllm(params)
    samples = [sample]
    for _ in range(MAX_CONTINUATIONS):
        output = await call_hook(path, name_of(sample), function, args, sample, dict(params), **kwargs)
        samples = list(flatten(output))
        # Aborted by somebody else (weights were updated, another rollout ended): what is there is continued.
        if execution.aborted or path != DEFAULT_GENERATE or samples[0].status is not Status.ABORTED:
            break
        await asyncio.sleep(0.02)
    if not samples:
        raise RolloutError("the generate function returned no sample", where=f"{path}: {name_of(sample)}")
    for leaf in samples:
        leaf.group_index, leaf.index, leaf.execution_id = (sample.group_index, sample.index, sample.execution_id)
        leaf.prompt = leaf.prompt or sample.prompt
        leaf.label = sample.label if leaf.label is None else leaf.label
        leaf.sampling_params = leaf.sampling_params or dict(sample.sampling_params)
        if leaf.status is not Status.ABORTED:
            check_sample(leaf, path)
    return samples


def _room(execution: Execution, sample: Sample, wanted: int | None) -> int:
    """The budget of the response under the bound of prompt + response."""
    num_prompt, bound = len(prompt_ids(execution.args, sample)), execution.max_context_len or 0
    if num_prompt >= bound:
        raise DataError(
            f"the prompt has {num_prompt} tokens and leaves no room under {bound}",
            where=f"max_context_len: {name_of(sample)}",
            remedy="set --rollout-max-prompt-len (--eval-max-prompt-len), which leaves such prompts out",
        )
    return bound - num_prompt if wanted is None else min(wanted, bound - num_prompt)


def _accepted(path: str, **kwargs: Any) -> dict[str, Any]:
    """Those keyword arguments that the function at `path` names, or all where it takes any."""
    names = _parameters(path)
    return kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}


@functools.cache  # reading a signature takes longer than all else that is done here for a sample
def _parameters(path: str) -> frozenset[str] | None:
    parameters = inspect.signature(load_function(path)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else frozenset(parameters)


async def run_sample_hooks(execution: Execution, sample: Sample) -> Sample:
    """The sample after all of --rollout-sample-hook-path; a hook may return another one."""
    for path in execution.args.rollout_sample_hook_path or []:
        function = load_function(path)
        kwargs = _accepted(path, rollout_id=execution.rollout_id, evaluation=execution.evaluation)
        out = await call_hook(path, name_of(sample), function, execution.args, sample, **kwargs)
        if out is not None and not isinstance(out, Sample):
            raise RolloutError(
                f"the sample hook returned {type(out).__name__}", where=path, remedy="return the sample, or None"
            )
        sample = out or sample
        check_sample(sample, path)
    return sample


async def call_hook(path: str, where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's hook, sync or async. Whatever it raises becomes a RolloutError that names it."""
    try:
        out = function(*args, **kwargs)
        return await out if inspect.isawaitable(out) else out
    except InstepError:
        raise
    except Exception as error:  # the border to the user's code
        at = raised_at(error, function)
        raise RolloutError(f"{path} raised {error!r}", where=f"{at}; {where}", remedy="mend the hook") from error

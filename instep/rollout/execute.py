"""One group from prompts to rewarded samples: the generate function, the sample hooks and the reward."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from instep.errors import InstepError, RolloutError
from instep.hooks import load_function
from instep.rollout.client import to_vllm
from instep.rollout.outputs import DONE, check_sample, flatten, name_of
from instep.rollout.rewards.dispatch import apply_group_reward, apply_reward
from instep.types import Group, Sample, Status

T = TypeVar("T")

DEFAULT_GENERATE = "instep.rollout.vllm_rollout.generate"
MAX_CONTINUATIONS = 100  # of one sample whose requests others abort (a sync, another rollout's end)


@dataclass
class Execution:
    """What all samples of one rollout or evaluation share."""

    args: Any
    rollout_id: int
    evaluation: bool
    semaphore: asyncio.Semaphore
    aborted: bool = False  # set once; nothing new is started then
    num_tokens: int = 0
    last_progress: float = field(default_factory=time.monotonic)


def new_execution(args: Any, rollout_id: int, *, evaluation: bool = False) -> Execution:
    limit = args.vllm_server_concurrency * max(1, len(args.rollout_engine_urls))
    return Execution(args, rollout_id, evaluation, asyncio.Semaphore(limit))


def sampling_seed(*parts: int | str | None) -> int:
    """A 63-bit seed from (run seed, group, index within the group, attempt), the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


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


async def run_group(execution: Execution, group: Group, params: dict[str, Any], seed_tag: str = "") -> Group:
    """Generate and reward all samples of a group; flat, siblings of a fan-out side by side.

    A group with an ABORTED sample has no rewards (the rollout was ended early).
    """
    args = execution.args
    jobs = []
    for i, sample in enumerate(group):
        seed = sampling_seed(f"{seed_tag}{args.rollout_seed}", sample.group_index, i, sample.attempt)
        jobs.append(run_sample(execution, sample, {**params, "seed": seed}))
    out = [leaf for samples in await gather(jobs) for leaf in samples]
    if args.group_rm and not execution.evaluation and not any(s.status is Status.ABORTED for s in out):
        await apply_group_reward(args, out)
    return out


async def run_sample(execution: Execution, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    """One run of the generate function, then hooks and reward; a list because of fan-out."""
    args = execution.args
    if sample.execution_id is None:
        sample.execution_id = f"{sample.group_index}.{sample.index}.{sample.attempt}"
    if sample.status in DONE and sample.response_length:  # finished in an earlier rollout, from the buffer
        samples = [sample]
    else:
        async with execution.semaphore:
            if execution.aborted:
                sample.status = Status.ABORTED
                return [sample]
            samples = await _generate(execution, sample, params)
        if any(s.status is Status.ABORTED for s in samples):
            return samples
        samples = [await _run_sample_hooks(execution, s) for s in samples]
        execution.num_tokens += sum(s.response_length for s in samples)
        execution.last_progress = time.monotonic()
    if execution.evaluation or not args.group_rm:
        await gather([apply_reward(args, s, evaluation=execution.evaluation) for s in samples if s.reward is None])
    return samples


async def _generate(execution: Execution, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    args = execution.args
    path = sample.generate_function_path or args.custom_generate_function_path or DEFAULT_GENERATE
    function = load_function(path)
    kwargs = {"evaluation": execution.evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    sample.sampling_params = to_vllm(params)
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
        leaf.group_index, leaf.index, leaf.execution_id = sample.group_index, sample.index, sample.execution_id
        leaf.sampling_params = leaf.sampling_params or dict(sample.sampling_params)
        if leaf.status is not Status.ABORTED:
            check_sample(leaf, path)
    return samples


async def _run_sample_hooks(execution: Execution, sample: Sample) -> Sample:
    for path in execution.args.rollout_sample_hook_path or []:
        function = load_function(path)
        out = await call_hook(
            path,
            name_of(sample),
            function,
            execution.args,
            sample,
            rollout_id=execution.rollout_id,
            evaluation=execution.evaluation,
        )
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
        raise RolloutError(f"{path} raised {error!r}", where=where, remedy="see the traceback in the log") from error


async def gather(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; at the first failure the others are cancelled before it is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Sequence[asyncio.Task[Any]], timeout: float = 5.0) -> None:
    """Cancel what is not done, and wait for it a bounded time (a hook may refuse to end)."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=timeout)


async def maybe_await(value: Awaitable[T] | T) -> T:
    return await value if inspect.isawaitable(value) else value

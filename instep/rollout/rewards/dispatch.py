"""The reward of a sample or a group, by custom functions or built-in rules, with a bound and named errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from instep.data.graders import GRADERS, grader_of
from instep.errors import ConfigError, InstepError, RewardError
from instep.hooks import defined_at, load_function, raised_at
from instep.rollout import runtime
from instep.rollout.http import post
from instep.rollout.rewards import text
from instep.rollout.rewards.dapo import dapo
from instep.rollout.rewards.pool import shared_pool
from instep.rollout.tokens import without_end
from instep.types import Group, Sample, name_of, reward_of

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings

T = TypeVar("T")
BUILT_IN = "built-in"  # as a sample's custom_rm_path: the rule of its rm_type instead of --custom-rm-path
MAX_ALGEBRA_CHARS = 1000  # a longer answer is compared as text only


async def apply_rewards(args: HookSettings, samples: Group, reward_key: str | None) -> None:
    """Set `reward` on the samples that have none; with --group-rm on all samples, in one call.

    In a reward that is a dict, the entry `reward_key` must be a finite number.

    Raises:
        RewardError: with the names of function, group and sample.
    """
    todo = [s for s in samples if s.reward is None]
    if args.group_rm and todo:
        todo, rewards = samples, await compute_reward(args, samples)
    else:
        rewards = await runtime.gather([compute_reward(args, s) for s in todo])
    for sample, reward in zip(todo, rewards, strict=True):
        sample.reward = reward
    for sample in samples:
        try:
            reward_of(sample, reward_key)
        except RewardError as error:
            where = f"{_function_of(args, sample)}: {name_of(sample)}"
            raise RewardError(error.what, where=where, remedy=error.remedy) from None


async def compute_reward(args: HookSettings, target: Sample | Group) -> Any:
    """The reward of a sample (a number or a dict), or a list of the rewards of a group.

    The first that is set decides: the sample's `custom_rm_path`, --custom-rm-path, `metadata["rm_type"]`, --rm-type.
    A custom function gets `target` as it is.

    Raises:
        ConfigError: no reward is chosen, or an unknown one.
        RewardError: the function raised, took longer than `--reward-timeout`, or returned a list of another length.
    """
    first = target if isinstance(target, Sample) else target[0]
    path = first.custom_rm_path or args.custom_rm_path
    if path is not None and path != BUILT_IN:
        out = await _custom(args, path, target)
        if not isinstance(target, Sample) and (not isinstance(out, (list, tuple)) or len(out) != len(target)):
            raise RewardError(
                f"it returned {out!r:.80} for a group of {len(target)} samples",
                where=f"{_named(args, path)}: group {first.group_index}",
                remedy="with --group-rm, return a list with one reward per sample",
            )
        return out
    if isinstance(target, Sample):
        return await _built_in(args, target)
    return await runtime.gather([_built_in(args, s) for s in target])


async def _custom(args: HookSettings, path: str, target: Sample | Group) -> Any:
    function = load_function(path)
    whose = name_of(target) if isinstance(target, Sample) else f"group {target[0].group_index}"
    where = f"{_named(args, path)}: {whose}"
    limit = args.reward_timeout
    hung = RewardError(
        f"the reward function took more than {limit:g} s",
        where=where,
        remedy="make it faster, or raise --reward-timeout",
    )
    try:
        if inspect.iscoroutinefunction(function):
            return await _bounded(runtime.bounded_steps(function(args, target), limit, hung), limit, hung)
        async with shared_pool(args.reward_num_workers).threads:
            out = await _bounded(runtime.in_daemon_thread(function, args, target), limit, hung)
        if inspect.isawaitable(out):
            return await _bounded(runtime.bounded_steps(_await(out), limit, hung), limit, hung)
        return out
    except InstepError:
        raise
    except Exception as error:  # the border to the user's code
        at = f"{where}; {raised_at(error, function)}"
        raise RewardError(
            f"the reward function raised {error!r}",
            where=at,
            remedy="correct that line, or catch the error there and return a reward, such as 0.0",
        ) from error


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _bounded(awaitable: Awaitable[T], limit: float, error: RewardError) -> T:
    """The result, or `error` after `limit` seconds; unlike `wait_for` it does not wait for the end of a hung task."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=limit)
        if not task.done():
            raise error
        return task.result()
    finally:
        task.cancel()


def rm_type_of(args: HookSettings, sample: Sample) -> str:
    """The name of a sample's built-in reward, checked."""
    name = (sample.metadata or {}).get("rm_type") or args.rm_type
    if not name:
        raise ConfigError("no reward is chosen", where=name_of(sample), remedy="give --rm-type or --custom-rm-path")
    if grader_of(str(name)) not in GRADERS:
        known = ", ".join(GRADERS)
        raise ConfigError(
            f"unknown reward {name!r}", where="--rm-type", remedy=f"one of {known}; boxed_ may precede it"
        )
    return str(name)


def _function_of(args: HookSettings, sample: Sample) -> str:
    path = sample.custom_rm_path or args.custom_rm_path
    return f"--rm-type {rm_type_of(args, sample)}" if path in (None, BUILT_IN) else _named(args, str(path))


def _named(args: HookSettings, path: str) -> str:
    """The flag that a custom reward comes from, the function and where it is defined."""
    flag = "--custom-rm-path" if path == args.custom_rm_path else "--eval-config, custom_rm_path"
    return ", ".join(filter(None, (f"{flag} {path}", defined_at(path))))


async def _built_in(args: HookSettings, sample: Sample) -> Any:
    name = rm_type_of(args, sample)
    response = sample.response
    if name.startswith("boxed_"):
        name, response = name.removeprefix("boxed_"), text.last_boxed(response) or ""
    if name == "random":
        import random

        return float(random.Random(f"{args.rollout_seed}/{sample.execution_id}").random() < 0.5)
    if name == "remote_rm":
        return await _remote(args, sample, response)
    if sample.label is None:
        raise RewardError(
            "the sample has no label",
            where=f"--rm-type {name}: {name_of(sample)}",
            remedy="name its column: --label-key",
        )
    if name in ("f1", "dapo"):
        response = without_end(args, response)
    if name == "f1":
        return text.f1(response, sample.label)
    if name == "gpqa":
        return text.gpqa(response, sample.label, sample.metadata or {})
    if name == "dapo":
        return dapo(response, sample.label)
    if name == "deepscaler":
        response = text.after_thinking(response) or ""
    return await _math(args, sample, text.last_boxed(response))


async def _math(args: HookSettings, sample: Sample, answer: str | None) -> float:
    """1.0 if the boxed answer equals the label (or one of several), else 0.0."""
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    pool = shared_pool(args.reward_num_workers)
    pool.warm()  # so that a worker runs when an answer needs algebra
    if answer is None:
        return 0.0
    hard = []
    for label in map(str, labels):
        label = text.last_boxed(label) or label
        equal = text.quick_equal(answer, label)
        if equal:
            return 1.0
        if equal is None and max(len(answer), len(label)) <= MAX_ALGEBRA_CHARS:
            hard.append(label)
    where = f"math reward: {name_of(sample)}"
    for label in hard:
        if await pool.equal(answer, label, timeout=args.reward_timeout, where=where):
            return 1.0
    return 0.0


async def _remote(args: HookSettings, sample: Sample, response: str) -> Any:
    """POST {prompt, response, label} to --rm-url; the answer is {"reward": ...}, or the reward itself as a dict."""
    if not args.rm_url:
        raise ConfigError("no address of the reward server", where="--rm-type remote_rm", remedy="give --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    try:
        answer = await post(args.rm_url, payload, timeout=args.reward_timeout)
    except InstepError as error:
        raise RewardError(error.what, where=f"{args.rm_url}: {name_of(sample)}", remedy=error.remedy) from error
    return answer.get("reward", answer)

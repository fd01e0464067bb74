"""The reward of a sample or a group, by custom functions or built-in rules, with time limits and named errors."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from instep.arguments.settings import HookSettings
from instep.data.graders import GRADERS, grader_of
from instep.errors import ConfigError, InstepError, RewardError
from instep.rollout import runtime
from instep.rollout.http import post_within
from instep.rollout.rewards import text
from instep.rollout.rewards.code import LIMITS, passes_all, read_tests
from instep.rollout.rewards.pool import shared_pool
from instep.rollout.tokens import without_end
from instep.system import spans
from instep.system.hooks import defined_at, load_function, raised_at, signature_for
from instep.system.hooks.user_code import is_from_outside, said
from instep.system.run_context import cached_per_run
from instep.types import Group, Sample, Status, as_number, name_of, reward_of

T = TypeVar("T")
BUILT_IN = "built-in"  # as a sample's custom_rm_path: use the rule of its rm_type, not --custom-rm-path


async def apply_rewards(
    args: HookSettings, samples: Group, reward_key: str | None, *, are_siblings: bool = False
) -> None:
    """Set `reward` on the samples without one; with --group-rm on all samples, in one call.

    If a reward is a dict, its entry `reward_key` must be a finite number. Numbers become Python numbers.

    Args:
        are_siblings: the samples come from one run of a generate function that returned a list. A function whose second
            parameter is `samples`, or is annotated as a list, gets those without a reward in one call, as in slime.

    Raises:
        RewardError: with the names of function, group and sample.
    """
    todo = [s for s in samples if s.reward is None]
    if args.group_rm and todo:
        todo, rewards = samples, await compute_reward(args, samples)
    elif are_siblings and todo and takes_lists(_path_of(args, todo[0])):
        rewards = await compute_reward(args, todo)
    else:
        rewards = await _rewards(args, todo)
    for sample, reward in zip(todo, rewards, strict=True):
        sample.reward = reward
    for sample in samples:
        sample.reward = _plain(sample.reward)
        try:
            reward_of(sample, reward_key)
        except RewardError as error:
            where = f"{_function_of(args, sample)}: {name_of(sample)}"
            raise RewardError(error.what, where=where, remedy=error.remedy) from None


async def _rewards(args: HookSettings, samples: Group) -> list[Any]:
    """Return the reward of each sample. A reward that a rule decides at once needs no task."""
    quick = spans.now() is None  # a profile shows each
    found = [_by_rule(args, s) if quick and _path_of(args, s) in (None, BUILT_IN) else _Later(None) for s in samples]
    late = [i for i, reward in enumerate(found) if isinstance(reward, _Later)]
    jobs = [(found[i].work or partial(compute_reward, args, samples[i]))() for i in late]
    for i, reward in zip(late, await runtime.gather(jobs), strict=True):
        found[i] = reward
    return found


def _plain(reward: Any) -> Any:
    """Return a reward with Python numbers in place of tensors and numpy numbers."""
    if isinstance(reward, dict):
        return {name: _plain(value) for name, value in reward.items()}
    number = None if isinstance(reward, (int, float)) else as_number(reward)
    return reward if number is None else number


@cached_per_run
def takes_lists(path: str | None) -> bool:
    """Return whether the function declares several samples: `samples`, or an annotation such as `list[Sample]`."""
    if path in (None, BUILT_IN):
        return False
    if is_trls(str(path)):
        return True
    second = list(inspect.signature(load_function(str(path))).parameters.values())[1:2]
    return any(p.name == "samples" or re.search(r"(?i)\b(list|sequence|group)\b", str(p.annotation)) for p in second)


@cached_per_run
def is_trls(path: str) -> bool:
    """Return whether it is in TRL's form: `f(prompts, completions, **columns) -> list of numbers`, sync or async."""
    return "completions" in inspect.signature(load_function(path)).parameters


def trl_arguments(args: HookSettings, samples: Group) -> dict[str, Any]:
    """Return the keywords of a call in TRL's form: lists with an entry per sample.

    `completions` are texts without the special tokens at their end; if prompts are conversations, lists of one message.
    `prompts` are as the engine got them, `completion_ids` the tokens. The labels are under the name of their column
    (`--label-key`) and under `label`. Every key of the metadata is a column.
    """
    texts = [without_end(args, s.response) for s in samples]
    chats = bool(args.apply_chat_template) or not all(isinstance(s.prompt, str) for s in samples)
    keys = sorted({key for s in samples for key in s.metadata or {}})
    columns: dict[str, Any] = {key: [(s.metadata or {}).get(key) for s in samples] for key in keys}
    labels = [s.label for s in samples]
    columns = {"label": labels} | columns | ({args.label_key: labels} if args.label_key else {})
    return {
        **columns,
        "prompts": [s.prompt for s in samples],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chats else texts,
        "completion_ids": [s.tokens[s.prompt_length :] for s in samples],
    }


async def compute_reward(args: HookSettings, target: Sample | Group) -> Any:
    """Return the reward of a sample (a number or a dict), or a list of the rewards of a group.

    The first of these that is set decides: the sample's `custom_rm_path`, --custom-rm-path, `metadata["rm_type"]`,
    --rm-type. A custom function gets `target` unchanged.

    Raises:
        ConfigError: no reward is chosen, or an unknown one.
        RewardError: the function raised, took longer than `--reward-timeout`, or returned a list of another length.
    """
    first = target if isinstance(target, Sample) else target[0]
    path = _path_of(args, first)
    with spans.span("reward", spans.ROLLOUT, lambda: {"of": name_of(first)}):
        if path is None or path == BUILT_IN:
            if isinstance(target, Sample):
                return await _built_in(args, target)
            return await runtime.gather([_built_in(args, s) for s in target])
        for sample in [target] if isinstance(target, Sample) else target:
            _refuse_failed(args, sample)
        out = await _custom(args, path, target)
        if isinstance(target, Sample):
            return _one_each(args, path, [target], out)[0] if is_trls(path) else out
        return _one_each(args, path, target, out)


def _refuse_failed(args: HookSettings, sample: Sample) -> None:
    """Raise a RewardError for a FAILED sample, unless its generate function has given it a reward."""
    if sample.status is Status.FAILED and sample.reward is None:
        what = "the generation of this sample has failed, so it has no reward (not even 0)"
        remedy = "set sample.reward in the generate function to train on it, or use --skip-failed-groups"
        raise RewardError(what, where=f"{_function_of(args, sample)}: {name_of(sample)}", remedy=remedy)


def _one_each(args: HookSettings, path: str, samples: Group, out: Any) -> list[Any]:
    """Return the rewards that a function has returned for several samples: a list, a tuple, an array or a tensor."""
    try:
        rewards = [] if isinstance(out, (str, dict)) else list(out)
    except Exception:  # noqa: BLE001 - the object is the user's and may not be a list
        rewards = []
    if len(rewards) != len(samples):
        what = f"it returned {said(out, 80)} for a group of {len(samples)} samples"
        remedy = "return a list with one reward per sample: it takes lists (--group-rm, fan-out, TRL's completions)"
        raise RewardError(what, where=f"{_named(args, path)}: group {samples[0].group_index}", remedy=remedy)
    return rewards


async def _custom(args: HookSettings, path: str, target: Sample | Group) -> Any:
    function = partial(load_function(path), args, target)
    if is_trls(path):
        columns = trl_arguments(args, [target] if isinstance(target, Sample) else target)
        function = partial(load_function(path), **columns)
    whose = name_of(target) if isinstance(target, Sample) else f"group {target[0].group_index}"
    where = f"{_named(args, path)}: {whose}"
    limit = args.reward_timeout
    what = f"the reward function took more than {limit:g} s"
    hung = RewardError(what, where=where, remedy="make it faster, or raise --reward-timeout")
    guard, is_async = partial(_guard, where, function.func), inspect.iscoroutinefunction(function.func)
    out: Any = None

    def reward_function() -> Any:
        with guard():
            return function()

    async def awaited() -> Any:
        with guard():
            return await (function() if is_async else out)

    if not is_async:
        async with shared_pool(args.reward_num_workers).threads:
            out = await _bounded(runtime.in_daemon_thread(reward_function), limit, hung)
        if not inspect.isawaitable(out):
            return out
    return await _bounded(runtime.bounded_steps(awaited(), limit, hung), limit, hung)


@contextmanager
def _guard(where: str, function: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except InstepError:
        raise
    except BaseException as error:  # noqa: BLE001 - this is the user's code; its sys.exit() would end the loop's thread
        if is_from_outside(error):
            raise
        fits = "correct that line; with --skip-failed-groups a sample that has no reward costs its group"
        what = f"the reward function raised {said(error)}"
        remedy = signature_for(error, function, "--custom-rm-path") or fits
        raise RewardError(what, where=f"{where}; {raised_at(error, function)}", remedy=remedy) from error


async def _bounded(awaitable: Awaitable[T], limit: float, error: RewardError) -> T:
    """Return the result, or raise `error` after `limit` seconds. Do not wait for the end of a hung task."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=limit)
        if not task.done():
            raise error
        if task.cancelled():
            what, remedy = "the reward function cancelled its own task", "let it return, or raise an error"
            raise RewardError(what, where=error.where, remedy=remedy)
        return task.result()
    finally:
        task.cancel()


def rm_type_of(args: HookSettings, sample: Sample) -> str:
    """Return the name of a sample's built-in reward, checked."""
    name = (sample.metadata or {}).get("rm_type") or args.rm_type
    if not name:
        raise ConfigError("no reward is chosen", where=name_of(sample), remedy="give --rm-type or --custom-rm-path")
    if grader_of(str(name)) not in GRADERS:
        known = ", ".join(GRADERS)
        raise ConfigError(
            f"unknown reward {name!r}", where="--rm-type", remedy=f"use one of {known}, also with boxed_ before it"
        )
    return str(name)


def _path_of(args: HookSettings, sample: Sample) -> str | None:
    return sample.custom_rm_path or args.custom_rm_path


def _function_of(args: HookSettings, sample: Sample) -> str:
    path = _path_of(args, sample)
    return f"--rm-type {rm_type_of(args, sample)}" if path in (None, BUILT_IN) else _named(args, str(path))


def _named(args: HookSettings, path: str) -> str:
    """Return the flag that a custom reward comes from, the function and where it is defined."""
    flag = "--custom-rm-path" if path == args.custom_rm_path else "--eval-config, custom_rm_path"
    return ", ".join(filter(None, (f"{flag} {path}", defined_at(path))))


class _Later(NamedTuple):
    """A reward that must be awaited: the rest of a rule's work, if a rule has begun it."""

    work: Callable[[], Coroutine[Any, Any, Any]] | None


async def _built_in(args: HookSettings, sample: Sample) -> Any:
    reward = _by_rule(args, sample)
    return await reward.work() if isinstance(reward, _Later) and reward.work else reward


def _by_rule(args: HookSettings, sample: Sample) -> Any:
    """Return the reward by the built-in rule of `sample`, or a `_Later` where something else has to do the work."""
    name = rm_type_of(args, sample)
    _refuse_failed(args, sample)
    rule, response = name.removeprefix("boxed_"), sample.response
    if rule == "random":
        import random

        return float(random.Random(f"{args.rollout_seed}/{sample.execution_id}").random() < 0.5)
    if rule in ("remote_rm", "code") and rule != name:
        response = text.last_boxed(response) or ""
    if rule == "remote_rm":
        return _Later(partial(_remote, args, sample, response))
    if sample.label is None:
        what = "the sample has no label"
        raise RewardError(what, where=f"--rm-type {rule}: {name_of(sample)}", remedy="name its column: --label-key")
    if rule == "code":
        return _Later(partial(_code, args, sample, response))
    if rule in ("math", "deepscaler"):
        shared_pool(args.reward_num_workers).warm()  # so that a worker runs when an answer needs algebra
    if rule in ("f1", "dapo", "exact_match"):
        response = without_end(args, response)
    graded = text.grade(name, response, sample.label, sample.metadata or {})
    return _Later(partial(_algebra, args, sample, graded)) if isinstance(graded, text.Algebra) else graded


async def _code(args: HookSettings, sample: Sample, response: str) -> float:
    """Return 1.0 if the program passes the label's tests, else 0.0. As many run at once as there are reward workers."""
    where = f"--rm-type code: {name_of(sample)}"
    try:
        # A test that is too slow fails by itself. So this bound is only for sandboxes that do not start.
        limit = args.reward_timeout + len(read_tests(sample.label)) * LIMITS.seconds
        remedy = "give fewer tests, or raise --reward-timeout"
        hung = RewardError(f"the tests took more than {limit:g} s", where=where, remedy=remedy)
        async with shared_pool(args.reward_num_workers).programs:
            graded = passes_all(response, sample.label, unsafe=args.unsafe_local_exec, where=where)
            return await _bounded(graded, limit, hung)
    except ValueError as error:
        what, remedy = f"the label {error}", "see docs/rewards.md for the accepted forms"
        raise RewardError(what, where=where, remedy=remedy) from error


async def _algebra(args: HookSettings, sample: Sample, graded: text.Algebra) -> float:
    pool, where = shared_pool(args.reward_num_workers), f"math reward: {name_of(sample)}"
    for label in graded.labels:
        if await pool.equal(graded.answer, label, timeout=args.reward_timeout, where=where):
            return 1.0
    return 0.0


async def _remote(args: HookSettings, sample: Sample, response: str) -> Any:
    """POST {prompt, response, label} to --rm-url. The answer is the reward: a number, a dict, or {"reward": ...}."""
    if not args.rm_url:
        raise ConfigError("no address of the reward server", where="--rm-type remote_rm", remedy="give --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    try:
        answer = await post_within(args.rm_url, payload, args.reward_timeout)
    except InstepError as error:
        raise RewardError(error.what, where=f"{args.rm_url}: {name_of(sample)}", remedy=error.remedy) from error
    return answer.get("reward", answer) if isinstance(answer, dict) else answer

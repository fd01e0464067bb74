"""Try the users' hooks on 4 prompts before anything expensive starts.

The rows come from the run's data. Responses are made up: the label's text, and the end-of-turn token as an engine
leaves it. With a custom generate function the trial waits until the engine is ready, and so do hooks that need its
samples. The data source returns to its earlier state, and so do the random generators of Python, numpy and torch.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from instep.algorithms.catalog import DEFAULT_ROLLOUT
from instep.arguments.args import RUNTIME_ATTRIBUTES
from instep.arguments.settings import HookSettings, Settings
from instep.controller.advantage_columns import processed_rewards
from instep.data.tokenizer import end_tokens
from instep.errors import ConfigError, InstepError, RolloutError
from instep.rollout import runtime
from instep.rollout.execute import Execution, new_execution, run_group, run_sample_hooks, train_sampling_params
from instep.rollout.filters import verdict_of
from instep.rollout.kv_budget import KVBudget
from instep.rollout.rewards.dispatch import apply_rewards
from instep.rollout.tokens import prompt_ids, tokenizer_of
from instep.system.documents import read_json
from instep.system.hooks import Hook
from instep.types import Group, Sample, Status, VersionSpan, reward_of

T = TypeVar("T")
NUM_PROMPTS = 4
NOT_BEGUN = "tried on 4 prompts, the run has not begun (--no-hook-trial leaves the trial out)"
NUM_NEW_TOKENS = 32  # of a trial's response, if the generate function obeys its sampling parameters
GENERATE_SECONDS = 300.0
_HOOKS = (
    "custom_rm_path custom_generate_function_path rollout_sample_hook_path dynamic_sampling_filter_path "
    "rollout_sample_filter_path buffer_filter_path custom_reward_post_process_path"
).split()


class HookTrial:
    """The trial of one run.

    Args:
        hook_args: the view of `args` that hooks get.
        source: the run's data source; no rollout uses it yet.

    Attributes:
        notes: findings that are not errors.
    """

    def __init__(self, args: Settings, hook_args: HookSettings, source: Any):
        self._args, self._hook_args, self._source = args, hook_args, source
        self._usual = args.rollout_function_path == DEFAULT_ROLLOUT and args.load_debug_rollout_data is None
        self._wanted = args.hook_trial and self._usual and any(getattr(args, name) for name in _HOOKS)
        self._needs_engine = args.custom_generate_function_path is not None
        self.notes: list[str] = []

    def before_start(self) -> None:
        """Try the hooks that need no engine.

        Raises:
            InstepError: a hook failed; the error names hook, row and remedy.
        """
        if self._args.hook_trial and self._usual:
            self._check_source()
            self._check_end()
        if not self._wanted or self._needs_engine:
            return
        try:
            self._run(self._made_up)
        except InstepError as error:
            cause = error.__cause__
            if not (isinstance(cause, AttributeError) and any(name in str(cause) for name in RUNTIME_ATTRIBUTES)):
                raise
            self._needs_engine = True  # for example a reward that asks the engine

    def with_engine(self) -> None:
        """Try a custom generate function, the hooks that get its samples, and hooks that ask the engine."""
        if self._wanted and self._needs_engine:
            self._run(self._generated if self._args.custom_generate_function_path else self._made_up)

    def _check_end(self) -> None:
        """Note a checkpoint in which no token ends a response."""
        args, folder = self._args, Path(self._args.hf_checkpoint)
        config = next(path for name in ("generation_config.json", "config.json") if (path := folder / name).exists())
        ends, _ = end_tokens(tokenizer_of(args), read_json(config).get("eos_token_id"))
        if not (ends or args.rollout_stop or args.rollout_stop_token_ids):
            self.notes.append(
                f"{folder} has no end token, so every response is cut off at its longest: name one (eos_token in its "
                "tokenizer_config.json), or give --rollout-stop"
            )

    def _run(self, trial: Callable[[list[Group]], Coroutine[Any, Any, None]]) -> None:
        """Try the first groups of the source, then restore it; try nothing if it cannot be restored."""
        source, args = self._source, self._args
        if not hasattr(source, "state_dict") or not args.rollout_global_dataset:
            return
        num_calls = NUM_PROMPTS * (3 + len(args.rollout_sample_hook_path)) + 3  # each has its own limit
        limit = args.reward_timeout * num_calls + min(GENERATE_SECONDS, args.rollout_timeout)
        state = copy.deepcopy(source.state_dict())
        with _same_random_state():
            try:
                groups = copy.deepcopy(source.get_samples(NUM_PROMPTS))
            finally:
                source.load_state_dict(state)
            try:
                runtime.run(trial(groups), timeout=limit)
            except InstepError as error:
                error.where = "; ".join(part for part in (error.where, NOT_BEGUN) if part)
                error.remedy = error.remedy or "correct the hook; `instep train --help` shows what it gets"
                raise

    # ---- the two kinds of responses ------------------------------------------------------------------------------

    async def _made_up(self, groups: list[Group]) -> None:
        end = "" if self._args.rollout_skip_special_tokens else tokenizer_of(self._hook_args).eos_token or ""
        for sample in (s for group in groups for s in group):
            _make_up_response(self._hook_args, sample, end)
        if all(await runtime.gather([self._hooks_and_reward(group, end) for group in groups])):
            self.notes.append(
                f"--custom-rm-path {self._args.custom_rm_path} gives less for the label with the end-of-turn token "
                f"{end} than without it: sample.response ends in that token, as in slime; compare "
                f"sample.response.removesuffix({end!r}), or give --rollout-skip-special-tokens, which leaves special "
                "tokens out of the text (the trained tokens stay the same)"
            )
        await self._rest(groups)

    async def _hooks_and_reward(self, group: Group, end: str) -> bool:
        """Try one sample of a group, and give its reward to the others; with --group-rm try all samples.

        Returns:
            Whether the end-of-turn token `end` takes half of the custom reward or more.
        """
        args, lower = self._args, False
        num_tried = len(group) if args.group_rm else 1
        execution = Execution(self._hook_args, 0, evaluation=False, kv_budget=KVBudget(1))
        try:
            for i in range(num_tried):
                hooks = ", ".join(args.rollout_sample_hook_path)
                group[i] = await self._bounded(hooks, group[i], run_sample_hooks(execution, group[i]))
            if args.custom_rm_path is not None:
                tried, bare = group[:num_tried], copy.deepcopy(group[:num_tried])
                await apply_rewards(self._hook_args, tried, args.reward_key)
                if end and all(s.response.endswith(end) for s in bare):
                    for sample in bare:
                        sample.response = sample.response.removesuffix(end)
                    await apply_rewards(self._hook_args, bare, args.reward_key)
                    rewards = [sum(reward_of(s, args.reward_key) for s in samples) for samples in (tried, bare)]
                    lower = rewards[1] > 0 and rewards[0] <= rewards[1] / 2  # a length penalty takes less
        except InstepError as error:
            error.where += f", {_row(group[0])}"
            raise
        for n, sample in enumerate(group):
            if args.custom_rm_path is None:  # a built-in rule needs no trial; later hooks get different rewards
                sample.reward = float(n % 2)
            elif n >= num_tried:
                sample.reward = copy.deepcopy(group[0].reward)
        return lower

    async def _generated(self, groups: list[Group]) -> None:
        execution = new_execution(self._hook_args, 0, is_trial=True)
        params = train_sampling_params(self._hook_args)
        params["max_new_tokens"] = min(NUM_NEW_TOKENS, params.get("max_new_tokens", NUM_NEW_TOKENS))
        tried = [g[:2] if self._args.group_rm else g[:1] for g in groups]
        await self._rest(await runtime.gather([run_group(execution, g, dict(params)) for g in tried]))

    # ---- hooks over groups ---------------------------------------------------------------------------------------

    async def _rest(self, groups: list[Group]) -> None:
        args, samples = self._args, [s for g in groups for s in g]
        if path := args.dynamic_sampling_filter_path:
            hook = Hook("--dynamic-sampling-filter-path", path)
            for group in copy.deepcopy(groups):
                await self._bounded(str(hook), group[0], verdict_of(hook, self._hook_args, group, _row(group[0])))
        if path := args.rollout_sample_filter_path:
            await self._call(Hook("--rollout-sample-filter-path", path), samples[0], copy.deepcopy(groups))
        if path := args.buffer_filter_path:
            hook = Hook("--buffer-filter-path", path)
            taken = await self._call(hook, samples[0], None, copy.deepcopy(groups), 2)
            if not isinstance(taken, list) or len(taken) > 2:
                raise hook.wrong(taken, "a list of at most 2 groups", "asked for 2 groups")
        if path := args.custom_reward_post_process_path:
            hook = Hook("--custom-reward-post-process-path", path)
            processed_rewards(hook, await self._call(hook, samples[0], copy.deepcopy(samples)), samples)

    async def _call(self, hook: Hook, sample: Sample, *arguments: Any) -> Any:
        return await self._bounded(str(hook), sample, hook.acall(self._hook_args, *arguments, where=_row(sample)))

    async def _bounded(self, path: str, sample: Sample, coro: Coroutine[Any, Any, T]) -> T:
        limit = self._args.reward_timeout
        hung = RolloutError(
            f"{path} took more than {limit:g} s", where=_row(sample), remedy="make it faster, or raise --reward-timeout"
        )
        try:
            return await asyncio.wait_for(runtime.bounded_steps(coro, limit, hung), limit)
        except TimeoutError:
            raise hung from None

    def _check_source(self) -> None:
        """Raise ConfigError for a data source without the methods that the run will call."""
        # Groups that were outstanding at a save are read again from the cursor, and put back.
        puts_back = self._args.partial_rollout or (self._args.save and hasattr(self._source, "cursor"))
        needed = ["get_samples", "add_samples"] if puts_back else ["get_samples"]
        missing = [name for name in needed if not hasattr(self._source, name)]
        kinds = (("state_dict", "load_state_dict"), ("save", "load"))
        if self._args.save and not any(all(hasattr(self._source, n) for n in kind) for kind in kinds):
            missing.append("state_dict and load_state_dict (or save and load), which --save needs")
        if missing:
            raise ConfigError(
                f"the data source has no {', '.join(missing)}",
                where=f"--data-source-path {self._args.data_source_path}",
                remedy="add it; see instep/data/source.py for the methods of a data source",
            )


def _make_up_response(args: Settings, sample: Sample, end: str) -> None:
    """Give a sample a completed response with the label as text, and `end`: the end-of-turn token, or nothing."""
    label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    text = label if isinstance(label, str) and label else json.dumps(label, default=str)
    tokenizer = tokenizer_of(args)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    sample.tokens = prompt_ids(args, sample)
    sample.append_response_tokens(ids, [-1.0] * len(ids), weight_versions=[VersionSpan("trial", 0, len(ids))])
    sample.response, sample.status = text + end, Status.COMPLETED
    sample.sampling_params = {"temperature": args.rollout_temperature}
    sample.execution_id = f"{sample.group_index}.{sample.index}"


def _row(sample: Sample) -> str:
    where = sample.extra.get("where")
    return f"{where}, group {sample.group_index}" if where else f"group {sample.group_index}, sample {sample.index}"


@contextmanager
def _same_random_state() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])

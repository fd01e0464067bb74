"""The users' hooks, tried on 4 prompts before anything expensive starts.

Rows are the run's own, responses are made up (the label's text) unless there is a custom generate function, which is
tried as soon as the engine is ready; what needs its samples is tried then, too. The data source is put back to where
it was, and so are Python's, numpy's and torch's generators of random numbers.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from instep.arguments import RUNTIME_ATTRIBUTES
from instep.arguments.rollout import DEFAULT_ROLLOUT
from instep.errors import ConfigError, InstepError, RolloutError
from instep.hooks import load_function
from instep.rollout import runtime
from instep.rollout.execute import (
    Execution,
    call_hook,
    new_execution,
    run_group,
    run_sample_hooks,
    train_sampling_params,
)
from instep.rollout.filters import as_filter_output
from instep.rollout.rewards.dispatch import apply_rewards
from instep.rollout.tokens import prompt_ids, tokenizer_of
from instep.types import Group, Sample, Status, VersionSpan

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings, Settings

T = TypeVar("T")
NUM_PROMPTS = 4
NUM_NEW_TOKENS = 32  # of a trial's response, for a generate function that heeds its sampling parameters
GENERATE_SECONDS = 300.0
_HOOKS = (
    "custom_rm_path",
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "buffer_filter_path",
    "custom_reward_post_process_path",
)


class HookTrial:
    """The trial of one run.

    Args:
        hook_args: the view of `args` that hooks get.
        source: the run's data source, which no rollout uses yet.
    """

    def __init__(self, args: Settings, hook_args: HookSettings, source: Any):
        self._args, self._hook_args, self._source = args, hook_args, source
        self._usual = args.rollout_function_path == DEFAULT_ROLLOUT and args.load_debug_rollout_data is None
        self._wanted = args.hook_trial and self._usual and any(getattr(args, name) for name in _HOOKS)
        self._needs_engine = args.custom_generate_function_path is not None

    def before_start(self) -> None:
        """Try what needs no engine.

        Raises:
            InstepError: a hook failed; the error names hook, row and remedy.
        """
        if self._args.hook_trial and self._usual:
            self._check_source()
        if not self._wanted or self._needs_engine:
            return
        try:
            self._run(self._made_up)
        except InstepError as error:
            cause = error.__cause__
            if not (isinstance(cause, AttributeError) and any(name in str(cause) for name in RUNTIME_ATTRIBUTES)):
                raise
            self._needs_engine = True  # a reward, say, that asks the engine itself

    def with_engine(self) -> None:
        """Try a custom generate function and the hooks that get what it makes, and hooks that ask the engine."""
        if self._wanted and self._needs_engine:
            self._run(self._generated if self._args.custom_generate_function_path else self._made_up)

    # ---- the two kinds of responses ------------------------------------------------------------------------------

    def _made_up(self, groups: list[Group]) -> None:
        for group in groups:
            for sample in group:
                _make_up_response(self._hook_args, sample)

        async def run() -> None:
            await runtime.gather([self._hooks_and_reward(group) for group in groups])

        num_calls = NUM_PROMPTS * (1 + len(self._args.rollout_sample_hook_path))  # each has a bound of its own
        self._await(run(), self._args.reward_timeout * num_calls + 10)
        self._rest(groups)

    async def _hooks_and_reward(self, group: Group) -> None:
        """Try one sample of a group, whose reward the others get, too; with --group-rm all samples."""
        args = self._args
        num_tried = len(group) if args.group_rm else 1
        execution = Execution(self._hook_args, 0, evaluation=False, semaphore=asyncio.Semaphore(1))
        try:
            for i in range(num_tried):
                hooks = ", ".join(args.rollout_sample_hook_path)
                group[i] = await self._bounded(hooks, group[i], run_sample_hooks(execution, group[i]))
            if args.custom_rm_path is not None:
                await apply_rewards(self._hook_args, group[:num_tried], args.reward_key)
        except InstepError as error:
            error.where += f", {_row(group[0])}"
            raise
        if args.custom_rm_path is None:  # a built-in rule needs no trial; what comes after gets rewards that differ
            for n, sample in enumerate(group):
                sample.reward = float(n % 2)
            return
        for sample in group[num_tried:]:
            sample.reward = copy.deepcopy(group[0].reward)

    def _generated(self, groups: list[Group]) -> None:
        execution = new_execution(self._hook_args, 0)
        params = train_sampling_params(self._hook_args)
        params["max_new_tokens"] = min(NUM_NEW_TOKENS, params.get("max_new_tokens", NUM_NEW_TOKENS))

        async def generate() -> list[Group]:
            tried = [g[:2] if self._args.group_rm else g[:1] for g in groups]
            return await runtime.gather([run_group(execution, g, dict(params)) for g in tried])

        limit = min(GENERATE_SECONDS, self._args.rollout_timeout)
        self._rest(self._await(generate(), limit))

    # ---- hooks over groups ---------------------------------------------------------------------------------------

    def _rest(self, groups: list[Group]) -> None:
        args, samples = self._args, [s for g in groups for s in g]
        if path := args.dynamic_sampling_filter_path:
            for group in groups:
                as_filter_output(self._call(path, group[0], copy.deepcopy(group)), path)
        if path := args.rollout_sample_filter_path:
            self._call(path, samples[0], copy.deepcopy(groups))
        if path := args.buffer_filter_path:
            taken = self._call(path, samples[0], None, copy.deepcopy(groups), 2)
            if not isinstance(taken, list) or len(taken) > 2:
                raise RolloutError(f"it returned {taken!r:.80} when asked for 2 groups", where=f"hook trial: {path}")
        if path := args.custom_reward_post_process_path:
            out = self._call(path, samples[0], copy.deepcopy(samples))
            if not isinstance(out, tuple) or len(out) != 2 or len(out[1]) != len(samples):
                raise RolloutError(
                    f"it returned {out!r:.80} for {len(samples)} samples",
                    where=f"hook trial: {path}",
                    remedy="return (raw_rewards, rewards), one of each per sample",
                )

    def _call(self, path: str, sample: Sample, *arguments: Any) -> Any:
        out = call_hook(path, _row(sample), load_function(path), self._hook_args, *arguments)
        return self._await(self._bounded(path, sample, out), self._args.reward_timeout + 10)

    async def _bounded(self, path: str, sample: Sample, coro: Coroutine[Any, Any, T]) -> T:
        limit = self._args.reward_timeout
        hung = RolloutError(
            f"{path} took more than {limit:g} s", where=_row(sample), remedy="mend it, or raise --reward-timeout"
        )
        return await runtime.bounded_steps(coro, limit, hung)

    def _await(self, coro: Coroutine[Any, Any, T], limit: float) -> T:
        try:
            return runtime.run(coro, timeout=limit)
        except InstepError as error:
            note = "tried on 4 prompts, the run has not begun (--no-hook-trial leaves the trial out)"
            error.where = "; ".join(part for part in (error.where, note) if part)
            error.remedy = error.remedy or "mend the hook"
            raise

    # ---- rows, without a trace -----------------------------------------------------------------------------------

    def _run(self, trial: Callable[[list[Group]], None]) -> None:
        with _same_random_state():
            groups = self._rows()
            if groups:
                trial(groups)

    def _rows(self) -> list[Group]:
        """Return the first groups of the source, which is put back; none if it cannot be put back."""
        source = self._source
        if not hasattr(source, "state_dict") or not self._args.rollout_global_dataset:
            return []
        state = copy.deepcopy(source.state_dict())
        try:
            return copy.deepcopy(source.get_samples(NUM_PROMPTS))
        finally:
            source.load_state_dict(state)

    def _check_source(self) -> None:
        needed = ["get_samples", "add_samples"] if self._args.partial_rollout else ["get_samples"]
        missing = [name for name in needed if not hasattr(self._source, name)]
        kinds = (("state_dict", "load_state_dict"), ("save", "load"))
        if self._args.save and not any(all(hasattr(self._source, n) for n in kind) for kind in kinds):
            missing.append("state_dict and load_state_dict (or save and load), which --save needs")
        if missing:
            raise ConfigError(
                f"the data source has no {', '.join(missing)}",
                where=f"--data-source-path {self._args.data_source_path}",
                remedy="add it; instep/data/source.py says what a data source has",
            )


def _make_up_response(args: Settings, sample: Sample) -> None:
    """Give a sample a completed response whose text is the label."""
    label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    text = label if isinstance(label, str) and label else json.dumps(label, default=str)
    ids = tokenizer_of(args)(text, add_special_tokens=False)["input_ids"]
    sample.tokens = prompt_ids(args, sample)
    sample.append_response_tokens(ids, [-1.0] * len(ids), weight_versions=[VersionSpan("trial", 0, len(ids))])
    sample.response, sample.status = text, Status.COMPLETED
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

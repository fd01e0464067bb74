"""The default rollout function and generate function, for every engine with vLLM's HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.sampling import record_turn
from instep.errors import RewardError, RolloutError
from instep.rollout import runtime
from instep.rollout.client import abort_all, get_model_url, to_vllm, wire_of
from instep.rollout.eval import evaluate
from instep.rollout.execute import Execution, new_execution, run_group, sampling_seed, train_sampling_params
from instep.rollout.filters import DynamicFilterOutput, verdict_of
from instep.rollout.group_request import ask, ended_at_joint, experts_wanted, generate_group, take
from instep.rollout.outputs import flatten, taken_from
from instep.rollout.tokens import TOKENS_BEFORE, prompt_ids, tokenizer_of
from instep.system.hooks import Hook
from instep.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Status

logger = logging.getLogger(__name__)

__all__ = ["GenerateState", "generate", "generate_rollout", "get_model_url"]

ABORT_SECONDS = 30.0  # time for requests to end after an abort; then they are cancelled
MIN_FAILURES = 8  # groups: a few failures do not end a small rollout
MAX_FAILURES_SHOWN = 3  # per rollout; metrics count all of them
MAX_WASTED_ROUNDS = 50  # times --rollout-batch-size: more discarded groups are an error


@dataclass(frozen=True)
class GenerateState:
    """slime's `GenerateState(args)`, with what generate functions use of it.

    It has neither `semaphore` nor `aborted`: a run bounds and ends its requests by itself.
    """

    args: HookSettings

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of --hf-checkpoint."""
        return tokenizer_of(self.args)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters of a training rollout, with slime's names, without a seed."""
        return train_sampling_params(self.args)


async def generate(
    args: HookSettings, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Generate the response of `sample`, or continue its response (a partial rollout, a further turn).

    `max_new_tokens` bounds the whole response, with its earlier turns. EOS and stop tokens stay in `tokens`. A stop
    string is only cut from `response`, even if an abort has divided it. Only training reads routed experts, so an
    `evaluation` does not keep them.

    Raises:
        EngineError: the engine refused the request, or did not answer.
    """
    params = to_vllm(sampling_params)
    before = sample.response_length
    sample.tokens = sample.tokens or prompt_ids(args, sample)
    if "max_tokens" in params:
        params["max_tokens"] -= before
        if params["max_tokens"] <= 0:
            sample.status = Status.TRUNCATED
            return sample
    if "min_tokens" in params:
        params["min_tokens"] = max(0, params["min_tokens"] - before)
    begun = 0  # how many of the response's last tokens an abort has left of this turn
    if before:
        if sample.status is Status.ABORTED:
            begun = next((n for n, mask in enumerate(reversed(sample.loss_mask or ())) if not mask), before)
        if sample.status is Status.ABORTED and args.mask_offpolicy_in_partial_rollout:
            sample.loss_mask = [0] * before
    if "seed" in params and (drawn := before + sample.extra.get(TOKENS_BEFORE, 0)):
        params["seed"] = sampling_seed(params["seed"], drawn)  # else the first random numbers would repeat
    record_turn(sample, params)
    params |= experts_wanted(args, sample, evaluation)
    (out,) = await ask(args, sample, params)
    if begun and params.get("stop") and out.token_ids:
        out = await ended_at_joint(args, sample, params, out, begun)
    await take(args, sample, params, out, evaluation=evaluation)
    return sample


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate until `--rollout-batch-size` groups are kept, or evaluate all evaluation sets. This call blocks.

    Groups are returned in the order of their `group_index`. Groups that were taken but not returned go to
    `data_source.add_samples` (partial rollouts) or `data_source.drop(groups, reason)`.

    Raises:
        EngineError, RewardError, RolloutError: the first error ends the rollout.
    """
    if evaluation:
        return evaluate(args, rollout_id)
    return runtime.run(GroupRollout(args, rollout_id, data_source).run(), timeout=args.rollout_timeout)


class GroupRollout:
    """The state of one training rollout."""

    def __init__(self, args: HookSettings, rollout_id: int, data_source: Any):
        self.args, self.data_source = args, data_source
        self.execution: Execution = new_execution(args, rollout_id)
        self.params = train_sampling_params(args)
        self.target = int(args.rollout_batch_size)
        self.pending: dict[asyncio.Task[Group], Group] = {}
        self.over: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()  # those that `_wait` has not returned yet
        self.kept: list[Group] = []
        self.finished: list[Group] = []  # all that were generated to their end, rejected ones too
        self.counts: Counter[str] = Counter()
        self.deadline = time.monotonic() + 0.95 * args.rollout_timeout  # before the caller's, whose error says less

    async def run(self) -> RolloutFnTrainOutput:
        try:
            while len(self.kept) < self.target:
                self._refill()
                for task in await self._wait():
                    await self._finish(task)
                self._report()
            await self._end_the_rest()
        finally:
            await runtime.cancel_tasks(list(self.pending))
        return await self._output()

    def _refill(self) -> None:
        while len(self.kept) + len(self.pending) < self.target:
            for group in taken_from(self.data_source, self.args.over_sampling_batch_size or self.target):
                task = asyncio.create_task(run_group(self.execution, group, dict(self.params), generate_group))
                task.add_done_callback(self.over.put_nowait)  # `asyncio.wait` would check each task at each wake
                self.pending[task] = group

    async def _wait(self) -> list[asyncio.Task[Group]]:
        """Return the tasks of groups that are done now, in the order of their group index."""
        # The clock decides which group is done first, but not the order of all of them.
        done, least = list[asyncio.Task[Group]](), len(self.pending) if self.args.deterministic_mode else 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.deadline - time.monotonic()):
                while len(done) < least or not self.over.empty():
                    done.append(await self.over.get())
        if done:
            return sorted(done, key=lambda task: order_of(self.pending[task]))
        raise self._late(len(self.kept), len(self.pending))

    def _late(self, num_kept: int, num_pending: int) -> RolloutError:
        return RolloutError(
            f"{num_kept} of {self.target} groups are ready after {self.args.rollout_timeout:.0f} s, "
            f"{num_pending} are under way, {self.counts['filtered']} were filtered out",
            where="--rollout-timeout",
            remedy="see the engines' logs, and whether a custom generate function waits without a bound",
        )

    async def _finish(self, task: asyncio.Task[Group]) -> None:
        issued, error = self.pending.pop(task), task.exception()
        if isinstance(error, (RewardError, RolloutError)):
            self._drop_failed(issued, error)
        else:
            await self._settle(issued, task.result())

    def _drop_failed(self, issued: Group, error: RewardError | RolloutError) -> None:
        """Drop a failed group, with --skip-failed-groups.

        Raises:
            RewardError, RolloutError: `error`, without the flag, or if too many groups failed: more than a rollout has
                (at least `MIN_FAILURES`), and more than were finished.
        """
        if not self.args.skip_failed_groups:
            raise error
        self.counts["failed"] += 1
        if self.counts["failed"] > max(MIN_FAILURES, self.target, len(self.finished)):
            raise error
        if self.counts["failed"] <= MAX_FAILURES_SHOWN:
            logger.warning("a group is dropped, because it has failed: %s", error)
        self.data_source.drop([issued], "failed")

    async def _settle(self, issued: Group, group: Group) -> None:
        """Keep one group, give it back, or drop it."""
        if any(s.status is Status.ABORTED for s in group):
            self._give_back(issued, group)
            self._check_waste()
            return
        self.finished.append(group)
        if len(self.kept) >= self.target:
            self._give_back(issued, group, reason="surplus")
            return
        verdict = await self._verdict(group)
        enough = len(self.kept) + len(self.pending) >= self.target  # without this group
        if verdict.keep or (verdict.keep_when_insufficient and not enough):
            self.kept.append(group)
            if (listener := runtime.state().kept_listener) is not None:
                listener(group)
            return
        self._reject(group, verdict)
        self._check_waste()

    def _reject(self, group: Group, verdict: DynamicFilterOutput) -> None:
        self.counts["filtered"] += 1
        self.counts[f"filtered/{verdict.reason}"] += 1
        self.data_source.drop([group], f"filtered:{verdict.reason}")

    def _check_waste(self) -> None:
        wasted = self.counts["filtered"] + self.counts["aborted"]
        if not self.execution.aborted and wasted > MAX_WASTED_ROUNDS * self.target:
            reasons = [f"{n} {k.partition('/')[2] or k}" for k, n in self.counts.items() if k != "filtered"]
            raise RolloutError(
                f"{wasted} groups were discarded and {len(self.kept)} of {self.target} kept: {', '.join(reasons)}",
                where=f"--dynamic-sampling-filter-path {self.args.dynamic_sampling_filter_path}",
                remedy="the task may be solved or far too hard: change the data, the reward or the filter",
            )

    async def _verdict(self, group: Group) -> DynamicFilterOutput:
        path = self.args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(True)
        return await verdict_of(Hook("--dynamic-sampling-filter-path", path), self.args, group)

    def _give_back(self, issued: Group, group: Group, reason: str = "aborted") -> None:
        self.counts[reason] += 1
        # Fan-out siblings cannot be continued. Without fan-out the group consists of the issued samples.
        whole = len(issued) == len(group) and all(a is b for a, b in zip(issued, group, strict=True))
        if self.args.partial_rollout and whole:
            self.data_source.add_samples([group])
        else:
            self.data_source.drop([group], reason)

    async def _end_the_rest(self) -> None:
        """Abort the requests on every engine until all are answered. After `ABORT_SECONDS`, cancel the rest."""
        self.execution.aborted = True
        deadline = time.monotonic() + ABORT_SECONDS
        while self.pending and time.monotonic() < deadline:
            # Repeat it, because a request may arrive at an engine after the abort.
            await abort_all(self.args.rollout_engine_urls, wire_of(self.args))
            done, _ = await asyncio.wait(self.pending, timeout=0.2)
            for task in sorted(done, key=lambda task: order_of(self.pending[task])):
                await self._finish(task)
        await self._cancel_pending()

    async def _cancel_pending(self) -> None:
        await runtime.cancel_tasks(list(self.pending))
        for group in self.pending.values():
            self.counts["cancelled"] += 1
            self.data_source.drop([group], "aborted")
        self.pending.clear()

    def _report(self) -> None:
        runtime.report_progress(
            len(self.kept),
            self.target,
            num_pending=len(self.pending),
            num_filtered=self.counts["filtered"],
            num_failed=self.counts["failed"],
            num_tokens=self.execution.num_tokens,
        )

    async def _output(self) -> RolloutFnTrainOutput:
        args, groups = self.args, sorted(self.kept, key=order_of)
        if path := args.rollout_sample_filter_path:
            await Hook("--rollout-sample-filter-path", path).acall(args, groups)
        if path := args.rollout_all_samples_process_path:
            everything = sorted(self.finished, key=order_of)
            await Hook("--rollout-all-samples-process-path", path).acall(args, everything, self.data_source)
        metrics = {f"rollout/num_groups_{k}": float(n) for k, n in self.counts.items()}
        metrics["rollout/num_tokens_generated"] = float(self.execution.num_tokens)
        return RolloutFnTrainOutput(groups, metrics)


def order_of(group: Group) -> tuple[int, int]:
    first = next(flatten(group))
    return (first.group_index or 0, first.index or 0)

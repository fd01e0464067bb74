"""The default rollout function and generate function, for every engine with vLLM's HTTP routes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from instep.data.sampling import record_turn
from instep.engines.wire import Completion
from instep.errors import EngineError, RolloutError
from instep.hooks import Hook
from instep.rollout import runtime
from instep.rollout.client import MAX_RETRIES, abort_all, complete, get_model_url, to_vllm, wire_of
from instep.rollout.eval import evaluate
from instep.rollout.execute import Execution, new_execution, run_group, sampling_seed, train_sampling_params
from instep.rollout.filters import DynamicFilterOutput, verdict_of
from instep.rollout.outputs import flatten
from instep.rollout.tokens import decode, prompt_ids, stop_string, trim_stop
from instep.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Status

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings

__all__ = ["generate", "generate_rollout", "get_model_url"]

ABORT_SECONDS = 30.0  # how long requests may take to end after an abort; then they are cancelled
MAX_WASTED_ROUNDS = 50  # more discarded groups than this times --rollout-batch-size are an error


async def generate(args: HookSettings, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of `sample`, or continue the one that it has (a partial rollout, a further turn).

    `max_new_tokens` bounds the whole response, with its earlier turns. EOS and stop tokens stay in `tokens`; a stop
    string is cut from `response` only.

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
    if before:
        if "seed" in params:  # otherwise the rest would repeat the random numbers of the beginning
            params["seed"] = sampling_seed(params["seed"], before)
        if sample.status is Status.ABORTED and args.mask_offpolicy_in_partial_rollout:
            sample.loss_mask = [0] * before
    record_turn(sample, params)
    out = await _complete(args, sample, params)
    sample.append_response_tokens(out.token_ids, out.log_probs, weight_versions=out.weight_versions)
    sample.status = out.status
    if sample.response_length:
        skip = bool(params.get("skip_special_tokens", True))
        ids = sample.tokens[-sample.response_length :]
        sample.response = await decode(args, ids, skip_special_tokens=skip)
        stop = out.stop_reason
        if stop is None and params.get("stop") and out.finish_reason == "stop":
            before_last = await decode(args, ids[:-1], skip_special_tokens=skip)
            stop = stop_string(sample.response, before_last, params["stop"])
        if isinstance(stop, str):
            former = await decode(args, ids[:before], skip_special_tokens=skip)
            sample.response = trim_stop(sample.response, stop, len(former) - len(stop))
    return sample


async def _complete(args: HookSettings, sample: Sample, params: dict[str, Any]) -> Completion:
    """The engine's continuation of the tokens of `sample`; `params` have vLLM's names."""
    wire = wire_of(args)
    try:
        return await complete(
            get_model_url(args, endpoint=wire.generate_route),
            str(args.hf_checkpoint),
            sample.tokens,
            params,
            wire=wire,
            timeout=args.rollout_timeout,
            max_retries=MAX_RETRIES if len(args.rollout_engine_urls) > 1 else 4,
            session=f"group-{sample.group_index}",
        )
    except EngineError as error:
        place = f", for the prompt of {sample.extra.get('where')}"
        if "where" in sample.extra and place not in error.where:  # one error may end several requests
            error.where += place
        raise


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate until `--rollout-batch-size` groups are kept, or evaluate all evaluation sets. This call blocks.

    Groups are returned in the order of their `group_index`. Groups that were taken but are not returned go to
    `data_source.add_samples` (partial rollouts) or `data_source.drop(groups, reason)`.

    Raises:
        EngineError, RewardError, RolloutError: the first error ends the rollout.
    """
    if evaluation:
        return evaluate(args, rollout_id)
    return runtime.run(_Rollout(args, rollout_id, data_source).run(), timeout=args.rollout_timeout)


class _Rollout:
    """The state of one training rollout."""

    def __init__(self, args: HookSettings, rollout_id: int, data_source: Any):
        self.args, self.data_source = args, data_source
        self.execution: Execution = new_execution(args, rollout_id)
        self.params = train_sampling_params(args)
        self.target = int(args.rollout_batch_size)
        self.pending: dict[asyncio.Task[Group], Group] = {}
        self.kept: list[Group] = []
        self.finished: list[Group] = []  # all that were generated to their end, also those that a filter rejects
        self.counts: Counter[str] = Counter()
        self.deadline = time.monotonic() + 0.95 * args.rollout_timeout  # before the caller's, whose error says less

    async def run(self) -> RolloutFnTrainOutput:
        try:
            while len(self.kept) < self.target:
                self._refill()
                for task in await self._wait():
                    await self._settle(self.pending.pop(task), task.result())
                self._report()
            await self._end_the_rest()
        finally:
            await runtime.cancel_tasks(list(self.pending))
        return await self._output()

    def _refill(self) -> None:
        while len(self.kept) + len(self.pending) < self.target:
            wanted = self.args.over_sampling_batch_size or self.target
            groups = self.data_source.get_samples(wanted)
            if not groups:
                raise RolloutError(
                    "the data source has no more groups",
                    remedy="add data, or fewer --num-rollout",
                    where="--data-source-path",
                )
            for group in groups:
                task = asyncio.create_task(run_group(self.execution, group, dict(self.params)))
                self.pending[task] = group

    async def _wait(self) -> list[asyncio.Task[Group]]:
        """The tasks of groups that are done now, in the order of their group index."""
        left = self.deadline - time.monotonic()
        # Which group is first depends on the clock; the order of all of them does not.
        when = asyncio.ALL_COMPLETED if self.args.deterministic_mode else asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(self.pending, timeout=left, return_when=when)
        if done:
            return sorted(done, key=lambda task: _order(self.pending[task]))
        raise RolloutError(
            f"{len(self.kept)} of {self.target} groups stand after {self.args.rollout_timeout:.0f} s, "
            f"{len(self.pending)} are under way, {self.counts['filtered']} were filtered out",
            where="--rollout-timeout",
            remedy="see the engines' logs, and whether a custom generate function waits without a bound",
        )

    async def _settle(self, issued: Group, group: Group) -> None:
        """Keep one group, or give it back or drop it."""
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
            return
        self.counts["filtered"] += 1
        self.counts[f"filtered/{verdict.reason}"] += 1
        self.data_source.drop([group], f"filtered:{verdict.reason}")
        self._check_waste()

    def _check_waste(self) -> None:
        wasted = self.counts["filtered"] + self.counts["aborted"]
        if not self.execution.aborted and wasted > MAX_WASTED_ROUNDS * self.target:
            reasons = [f"{n} {k.partition('/')[2] or k}" for k, n in self.counts.items() if k != "filtered"]
            raise RolloutError(
                f"{wasted} groups were thrown away and {len(self.kept)} of {self.target} kept: {', '.join(reasons)}",
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
        # Fan-out siblings cannot be continued; without fan-out the group consists of the samples that were issued.
        whole = len(issued) == len(group) and all(a is b for a, b in zip(issued, group, strict=True))
        if self.args.partial_rollout and whole:
            self.data_source.add_samples([group])
        else:
            self.data_source.drop([group], reason)

    async def _end_the_rest(self) -> None:
        """Abort the requests on every engine until all are answered; after `ABORT_SECONDS`, cancel the rest."""
        self.execution.aborted = True
        deadline = time.monotonic() + ABORT_SECONDS
        while self.pending and time.monotonic() < deadline:
            # Repeated, because a request may arrive at an engine after the abort.
            await abort_all(self.args.rollout_engine_urls, wire_of(self.args))
            done, _ = await asyncio.wait(self.pending, timeout=0.2)
            for task in sorted(done, key=lambda task: _order(self.pending[task])):
                await self._settle(self.pending.pop(task), task.result())
        if self.pending:
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
            num_tokens=self.execution.num_tokens,
        )

    async def _output(self) -> RolloutFnTrainOutput:
        args, groups = self.args, sorted(self.kept, key=_order)
        if path := args.rollout_sample_filter_path:
            await Hook("--rollout-sample-filter-path", path).acall(args, groups)
        if path := args.rollout_all_samples_process_path:
            everything = sorted(self.finished, key=_order)
            await Hook("--rollout-all-samples-process-path", path).acall(args, everything, self.data_source)
        metrics = {f"rollout/num_groups_{k}": float(n) for k, n in self.counts.items()}
        metrics["rollout/num_tokens_generated"] = float(self.execution.num_tokens)
        return RolloutFnTrainOutput(groups, metrics)


def _order(group: Group) -> tuple[int, int]:
    first = next(flatten(group))
    return (first.group_index or 0, first.index or 0)

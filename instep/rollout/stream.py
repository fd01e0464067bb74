"""Groups that are generated continuously beside the training, by the default generate function or another.

A group begins as soon as there is room for it: a place in one of the rounds that may still train on its tokens. A round
takes the group when it is finished. The last round that may train on it waits for it. So groups start later, and
finished groups are not discarded for their age.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from instep.arguments.settings import HookSettings
from instep.data.ledger import begin_under
from instep.errors import RewardError, RolloutError
from instep.rollout import runtime
from instep.rollout.execute import run_group
from instep.rollout.group_request import generate_group
from instep.rollout.outputs import flatten, taken_from
from instep.rollout.vllm_rollout import GroupRollout, order_of
from instep.types import Group, RolloutFnTrainOutput, Status


@dataclass
class _Begun:
    """A group that has begun.

    Attributes:
        fresh: a copy from before it began, for a restart.
        version: the oldest version of its tokens; until it has tokens, that of the engines when it began.
        group: None until it is finished.
    """

    fresh: Group
    version: int
    group: Group | None = None


class Stream(GroupRollout):
    """The groups of all rounds. Its coroutines run on the loop of `runtime`; their callers wait outside.

    Args:
        version: the weight version of the engines.
        finished: groups that are ready from the start, because a checkpoint has kept them.
    """

    def __init__(
        self, args: HookSettings, data_source: Any, rollout_id: int, version: int, finished: Iterable[Group] = ()
    ):
        super().__init__(args, rollout_id, data_source)
        self._begun = {order_of(g): _Begun([], oldest_version(g, version), g) for g in finished}
        self._tasks: set[asyncio.Task[None]] = set()
        self._version, self._room = version, 0
        self._num_wasted = 0  # tokens of groups that reach no round
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def num_ready(self) -> int:
        """Groups that are finished and wait for a round."""
        return sum(entry.group is not None for entry in self._begun.values())

    async def open(self, version: int, room: int) -> None:
        """Set the engines' `version`, and let up to `room` groups be generated or wait for a round."""
        self._version, self._room = version, room
        self._begin()

    async def settled(self) -> None:
        """Wait until no group is being generated. Then ready groups fill the whole room."""
        await self._until(lambda: not self._tasks)

    async def take(self, rollout_id: int, oldest: int, places: Callable[[int], int]) -> RolloutFnTrainOutput:
        """Take the groups of a round. Groups with tokens older than version `oldest` are not trained on.

        Args:
            places: how many groups of each version, and of older ones, can wait for later rounds.
        """
        await self._until(lambda: self._can_take(oldest, places))
        chosen = sorted((entry.version, key) for key, entry in self._begun.items() if entry.group is not None)
        self.kept = [group for _, key in chosen[: self.target] if (group := self._begun.pop(key).group) is not None]
        # Tokens count in the round that takes their group. So a resume, which finds it finished, changes no metric.
        self.execution.num_tokens = self._num_wasted + sum(map(num_tokens, self.kept))
        output = await self._output()
        output.metrics["async/queue_length"] = float(self.num_ready)
        self.finished, self._num_wasted = [], 0
        self.counts.clear()
        self.execution.rollout_id = rollout_id + 1
        lengths = self.execution.lengths
        if lengths.num_samples:
            self.execution.expected_tokens = lengths.num_tokens / lengths.num_samples
            self.execution.expected_prompt = lengths.num_prompt_tokens / lengths.num_samples
        await self.open(self._version, places(self._version))
        return output

    def _can_take(self, oldest: int, places: Callable[[int], int]) -> bool:
        """Return whether enough groups are ready, with all that cannot wait. The oldest are taken first."""
        for key, entry in list(self._begun.items()):
            if entry.group is not None and entry.version < oldest:
                self._too_old(key)
        self._begin()
        entries = sorted((entry.version, key, entry.group is not None) for key, entry in self._begun.items())
        if self.args.deterministic_mode:  # the order of the starts decides, not the order of the ends
            return len(entries) >= self.target and all(ready for _, _, ready in entries[: self.target])
        num_ready = 0
        for i, (version, _, ready) in enumerate(entries):
            num_ready += ready
            last_of_version = i + 1 == len(entries) or entries[i + 1][0] > version
            if last_of_version and num_ready < min(self.target, i + 1 - places(version)):
                return False
        return num_ready >= self.target

    def _too_old(self, key: tuple[int, int]) -> None:
        """Issue a finished group again, or drop it, because it is older than the bound.

        It has tokens from another rollout, or the bound has changed. A checkpoint keeps a finished group as its
        functions have left it, not as it was issued. So after a resume with a smaller bound it cannot restart.
        """
        entry = self._begun.pop(key)
        assert entry.group is not None
        self._num_wasted += num_tokens(entry.group)
        self.counts["stale"] += 1
        begins_anew = bool(entry.fresh) and not any(s.response_length for s in entry.fresh)
        if self.args.stale_groups == "requeue" and begins_anew:
            self.data_source.give_again([entry.fresh])
        else:
            self.data_source.drop([entry.group], "stale")

    def _begin(self) -> None:
        """Begin groups while there is room."""
        while self._error is None and len(self._begun) < self._room:
            group = taken_from(self.data_source, 1)[0]
            key = order_of(group)
            fresh = copy.deepcopy(group)
            begin_under(group, self._version)
            self._begun[key] = _Begun(fresh, oldest_version(group, self._version))
            task = asyncio.create_task(self._run(key, group))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _run(self, key: tuple[int, int], issued: Group) -> None:
        entry = self._begun[key]
        try:
            group = await run_group(self.execution, issued, dict(self.params), generate_group)
        except (RewardError, RolloutError) as error:
            self._drop_failed(issued, error)
            del self._begun[key]
            return self._begin()
        for sample in group:
            sample.begun_version = entry.version if sample.begun_version is None else sample.begun_version
        if any(s.status is Status.ABORTED for s in group):  # by a sync: its own generate function has not continued
            del self._begun[key]
            self._num_wasted += num_tokens(group)
            self.counts["aborted"] += 1
            self.data_source.give_again([entry.fresh])
        else:
            self.finished.append(group)
            verdict = await self._verdict(group)
            if verdict.keep or verdict.keep_when_insufficient:
                entry.group, entry.version = group, oldest_version(group, entry.version)
                self.data_source.ledger.finish([group])
            else:
                del self._begun[key]
                self._num_wasted += num_tokens(group)
                self._reject(group, verdict)
        self._check_waste()
        self._begin()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._changed.set()

    async def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 0.95 * self.args.rollout_timeout  # before the caller's, whose error says less
        while True:
            if self._error is not None:
                await runtime.cancel_tasks(list(self._tasks))
                raise self._error
            if done():
                return
            runtime.report_progress(min(self.num_ready, self.target), self.target, num_pending=len(self._tasks))
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise self._late(self.num_ready, len(self._tasks)) from None


def num_tokens(group: Group) -> int:
    """Return the number of tokens that were generated for a group."""
    return sum(sample.response_length for sample in flatten(group))


def oldest_version(group: Group, otherwise: int) -> int:
    """Return the oldest known version of a group's tokens; `otherwise` if no version is known."""
    known = [int(v.version) for s in group for v in s.version_spans if v.version.isdigit()]
    return min(known, default=otherwise)

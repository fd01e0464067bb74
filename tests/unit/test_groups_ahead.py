"""Groups that are generated beside the training: real stream, ledger and data source, a generation that only waits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.controller.ahead import GroupsAhead, RoundsAhead, rollouts_ahead
from instep.controller.round import Rollout
from instep.controller.run_state import data_state, restore_data
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import RewardError
from instep.rollout import runtime
from instep.rollout.stream import oldest_version
from instep.train_async import syncs_after
from instep.types import Group, Sample, Status, VersionSpan
from tests.assets import make_checkpoint

TICK, LONGEST = 0.001, 60
now: Any = None  # the `Run` that the hooks below belong to


async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Any:
    """A response whose length has a heavy tail; each half is of the version of its time."""
    length = random.Random(sample.group_index).paretovariate(0.7)
    halves = []
    for _ in range(2):
        halves.append(now.deployment.version)
        await asyncio.sleep(TICK * min(length, LONGEST))
    spans = [VersionSpan(str(v), i, i + 1) for i, v in enumerate(halves)]
    sample.tokens = [1]
    sample.append_response_tokens([2, 3], [-1.0, -1.0], weight_versions=spans)
    sample.status = Status.COMPLETED
    if sample.group_index in now.twins:  # fan-out
        return [sample, copy.deepcopy(sample)]
    if sample.group_index in now.silent:
        sample.metadata["version"] = halves[0]
        sample.weight_versions = spans[1:] if sample.index % 2 else []
    if sample.group_index in now.aborted:  # and its generate function does not go on
        now.aborted.remove(sample.group_index)
        sample.status = Status.ABORTED
    if sample.group_index in now.foreign:  # whose tokens somebody else has made earlier
        now.foreign.remove(sample.group_index)
        sample.weight_versions = [VersionSpan("0", 0, 2)]
    return sample


async def reward(args: Any, sample: Sample) -> float:
    if sample.group_index == now.broken:
        raise ValueError("no reward today")
    return 1.0


def not_every_fifth(args: Any, group: Group) -> bool:
    return group[0].group_index % 5 != 4


class Run:
    """What `GroupsAhead` needs of a controller, whose training takes a few ticks."""

    def __init__(self, args: Any, state: dict[str, Any] | None = None, start: int = 0):
        self.args, self.hook_args = (
            args,
            args.view({"rollout_engine_urls": [], "rollout_engine_kind": "embedded", "num_rollout": args.num_rollout}),
        )
        self.ledger, self.num_rollout, self.start_rollout_id = Ledger(), args.num_rollout, start
        self.data_source = LedgeredDataSource(RolloutDataSourceWithBuffer(self.hook_args), self.ledger)
        self.deployment = SimpleNamespace(version=1, trained_version=1)
        self.log = SimpleNamespace(phase=lambda *_: contextlib.nullcontext())
        self.broken, self.foreign, self.most, self.trained = None, set[int](), 0, list[list[int]]()
        self.silent: Any = ()
        self.twins: Any = ()
        self.aborted = set[int]()
        self.ages: list[int] = []
        if state is not None:
            restore_data(self.data_source, state, start - 1, Path())
            self.deployment.version = self.deployment.trained_version = state["version"]
        global now
        now = self
        self.ahead = GroupsAhead(self, self.due)  # type: ignore[arg-type]

    def due(self, rollout_id: int) -> bool:
        return syncs_after(self.args, rollout_id, self.num_rollout)

    def call(self, work: Any, what: str) -> Any:
        return work()

    def rollout_of(self, rollout_id: int, output: Any, num_dropped: int, seconds: Any) -> Rollout:
        return Rollout(rollout_id, output.samples, output.metrics, seconds)

    def sync_weights(self) -> None:
        self.deployment.version += 1
        self.deployment.trained_version = self.deployment.version

    def rounds(self, until: int | None = None) -> Iterator[Rollout]:
        for rollout_id in range(self.start_rollout_id, until or self.num_rollout):
            rollout = self.ahead.take(rollout_id)
            self.most = max(self.most, self.ledger.num_outstanding)
            self.trained.append([g[0].group_index or 0 for g in rollout.groups])
            self.ages += [
                self.deployment.trained_version - int(s.version)
                for g in rollout.groups for sample in g for s in sample.weight_versions
            ]  # fmt: skip
            runtime.run(asyncio.sleep(5 * TICK))
            self.ledger.consume(rollout.groups)
            self.deployment.trained_version = self.deployment.version + 1
            if self.due(rollout_id):
                self.ahead.sync(rollout_id)
            self.ledger.check()
            yield rollout

    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps({**data_state(self.data_source, 0), "version": self.deployment.version}))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    make_checkpoint(tmp_path / "hf")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(500)))

    def args(*more: str) -> Any:
        words = ["--hf-checkpoint", str(tmp_path / "hf"), "--prompt-data", str(tmp_path / "a.jsonl"), "--input-key"]
        words += ["prompt", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-rollout", "12"]
        words += ["--custom-rm-path", f"{__name__}.reward", "--custom-generate-function-path", f"{__name__}.generate"]
        words += ["--actor-num-gpus-per-node", "1", "--rollout-timeout", "30", "--device", "cpu"]
        return parse([*words, *more], "train-async")

    yield args
    runtime.shutdown()


FILTER = ["--dynamic-sampling-filter-path", f"{__name__}.not_every_fifth"]


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("filters", [False, True])
def test_no_token_is_older_than_the_bound_and_no_group_is_dropped_for_it(make, bound, interval, filters):
    run = Run(make("--max-staleness", str(bound), "--update-weights-interval", str(interval), *FILTER * filters))
    metrics = [rollout.metrics for rollout in run.rounds()]
    trained = [g for groups in run.trained for g in groups]
    assert [len(groups) for groups in run.trained] == [4] * 12 and len(set(trained)) == 48
    assert 0 < max(run.ages) <= bound  # it runs ahead, and the bound holds
    assert trained != sorted(trained)  # groups have overtaken others
    assert run.most <= 4 * (1 + interval * bound)  # starts are withheld
    assert set(run.ledger.dropped) <= {"filtered:not_every_fifth"} and run.ledger.num_outstanding == 0
    assert filters == any(index % 5 == 4 for index in set(range(max(trained))) - set(trained))
    assert metrics[-1]["async/queue_length"] == 0


def test_siblings_count_as_one_sample(make):
    run = Run(make("--max-staleness", "2"))
    run.twins = range(0, 1000, 3)
    groups = [group for rollout in run.rounds() for group in rollout.groups]
    assert [len(groups) for groups in run.trained] == [4] * 12 and 0 < max(run.ages) <= 2
    assert all(len(group) == (4 if group[0].group_index in run.twins else 2) for group in groups)


@pytest.mark.parametrize("stale, dropped", [("drop", {"stale": 2}), ("requeue", {})])
def test_a_group_of_somebody_else_s_weights_is_dropped_or_begun_anew(make, stale, dropped):
    args = make("--max-staleness", "1", "--stale-groups", stale, "--num-rollout", "6")
    run = Run(args)
    run.foreign = {9, 14}
    rollouts = list(run.rounds())
    assert max(run.ages) <= 1 and run.ledger.dropped == dropped and run.ledger.num_consumed == 24
    assert sum(rollout.metrics.get("rollout/num_groups_stale", 0) for rollout in rollouts) == 2
    trained = {g for groups in run.trained for g in groups}
    assert ({9, 14} <= trained) == (stale == "requeue")


def test_groups_begin_anew_whatever_the_data_source_can(make):
    run = Run(make("--max-staleness", "1", "--stale-groups", "requeue", "--num-rollout", "6"))
    run.data_source.source = SimpleNamespace(get_samples=run.data_source.source.get_samples)  # and nothing else
    run.foreign, run.aborted = {9}, {14}
    list(run.rounds())
    assert {9, 14} <= {g for groups in run.trained for g in groups} and not run.foreign and not run.aborted
    assert run.ledger.num_consumed == run.ledger.num_issued == 24 and not run.ledger.dropped


def silent_run(args: Any, *resumed_with: Any) -> Run:
    run = Run(args, *resumed_with)
    run.silent = range(1000)
    return run


def test_tokens_of_unknown_versions_are_as_old_as_their_group(make):
    args = make("--max-staleness", "2")
    run = silent_run(args)
    for rollout in run.rounds(until=6):
        for group in rollout.groups:
            begun = {sample.begun_version for sample in group}
            assert begun == {oldest_version(group, 99)} and begun.pop() <= min(s.metadata["version"] for s in group)
    runtime.run(asyncio.sleep(3 * LONGEST * TICK))
    kept = {g[0].group_index: oldest_version(g, 99) for g in run.ledger.finished}
    assert kept and min(kept.values()) < run.deployment.version
    again = silent_run(args, run.state(), 6)
    stands = {key[0]: entry.version for key, entry in again.ahead._stream._begun.items()}
    assert kept.items() <= stands.items()  # not the version of the checkpoint


@pytest.mark.parametrize("filters", [False, True])
def test_a_deterministic_run_goes_on_as_if_it_had_never_ended(make, filters):
    args = make("--max-staleness", "2", "--deterministic-mode", *FILTER * filters)
    whole, first = Run(args), None
    expected = [r.groups for r in whole.rounds()]
    first = Run(args)
    for rollout in first.rounds(until=5):
        assert rollout.groups == expected[rollout.rollout_id]
    state = first.state()
    assert len(state["ledger"]["finished"]) >= 8  # of two earlier versions, with their tokens
    again = Run(args, state, start=5)
    for rollout in again.rounds():
        assert rollout.groups == expected[rollout.rollout_id]
    assert again.ledger.state_dict() == whole.ledger.state_dict()
    assert again.data_source.source.state_dict() == whole.data_source.source.state_dict()
    trained = [g for groups in whole.trained for g in groups]
    assert trained == sorted(trained) and set(whole.ages) == {0, 1, 2}


def test_an_error_of_one_group_ends_the_run(make):
    run = Run(make("--max-staleness", "1"))
    run.broken = 10
    with pytest.raises(RewardError, match="no reward today"):
        list(run.rounds())


def test_a_group_that_fails_is_dropped_with_skip_failed_groups(make):
    run = Run(make("--max-staleness", "1", "--skip-failed-groups"))
    run.broken = 10
    list(run.rounds())
    trained = [index for indices in run.trained for index in indices]
    assert trained and 10 not in trained and len(set(trained)) == len(trained)


def test_a_resume_with_fewer_rounds_takes_what_is_there(make):
    """More groups are finished than the last round takes, and none is under way."""
    first = Run(make("--max-staleness", "2"))
    list(first.rounds(until=5))
    runtime.run(asyncio.sleep(3 * LONGEST * TICK))
    state = first.state()
    assert len(state["ledger"]["finished"]) > 4
    again = Run(make("--max-staleness", "2", "--num-rollout", "6"), state, start=5)
    assert [len(rollout.groups) for rollout in again.rounds()] == [4]


def test_a_finished_run_makes_no_stream(make):
    """There are no engines then."""
    ledger = SimpleNamespace(finished=[[Sample()]])
    args = make("--max-staleness", "2")
    controller: Any = SimpleNamespace(args=args, ledger=ledger, start_rollout_id=12, num_rollout=12)
    assert isinstance(rollouts_ahead(controller, lambda _: True), RoundsAhead)


def test_a_resume_counts_the_tokens_that_the_run_would_have_counted(make: Any) -> None:
    """Groups that a checkpoint kept were generated before it; those that were taken before do not count again."""
    args = make("--max-staleness", "2", "--deterministic-mode")
    name, whole, states = "rollout/num_tokens_generated", [], []
    run = Run(args)
    for rollout in run.rounds():
        whole.append(rollout.metrics[name])
        states.append(run.state())
    assert whole == [16.0] * 12, "4 groups of 2 samples of 2 tokens"
    kept = 0
    for start in (3, 7):
        again = Run(args, states[start - 1], start)
        kept += len(again.ledger.finished)
        assert [rollout.metrics[name] for rollout in again.rounds()] == whole[start:]
    assert kept


def test_a_round_that_a_checkpoint_kept_has_its_tokens(make: Any) -> None:
    run = Run(make("--max-staleness", "2", "--deterministic-mode"))
    next(rounds := run.rounds())
    rounds.close()
    groups = run.ledger.finished
    assert groups
    kept = RoundsAhead(run, 0).take(run.start_rollout_id)  # type: ignore[arg-type]
    assert kept.metrics["rollout/num_tokens_generated"] == 4.0 * len(groups)

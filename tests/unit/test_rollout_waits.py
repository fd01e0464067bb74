"""How a rollout waits for its groups: one by one, or in deterministic mode for all of them, until its time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from instep.errors import RewardError, RolloutError
from instep.rollout import vllm_rollout
from instep.rollout.vllm_rollout import GroupRollout
from instep.types import Group, Sample
from tests.bounds import allowed

STEP = 0.1


def rounds_of(
    monkeypatch: pytest.MonkeyPatch, delays: Sequence[float], timeout: float = 60, *, all_at_once: bool = False
) -> list[list[int]]:
    """The groups that come out of each wait; group i takes `delays[i]` steps, and fails if that is negative."""
    groups = [[Sample(group_index=i, index=i)] for i in range(len(delays))]
    args: Any = SimpleNamespace(
        rollout_batch_size=len(groups), over_sampling_batch_size=None, rollout_timeout=timeout,
        deterministic_mode=all_at_once,
    )  # fmt: skip

    async def run_group(execution: Any, group: Group, *_: Any) -> Group:
        delay = delays[group[0].index or 0]
        await asyncio.sleep(STEP * abs(delay))
        if delay < 0:
            raise RewardError("no reward", where="here", remedy="")
        return group

    monkeypatch.setattr(vllm_rollout, "new_execution", lambda *_: None)
    monkeypatch.setattr(vllm_rollout, "train_sampling_params", lambda _: {})
    monkeypatch.setattr(vllm_rollout, "run_group", run_group)

    async def run() -> list[list[int]]:
        source = SimpleNamespace(get_samples=lambda n: groups)
        rollout, found = GroupRollout(args, 0, source), []
        rollout._refill()
        while rollout.pending:
            done = await rollout._wait()
            assert all(task.done() for task in done)
            found.append([rollout.pending.pop(task)[0].index or 0 for task in done])
        return found

    return asyncio.run(run())


def test_groups_come_when_they_are_done_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = rounds_of(monkeypatch, [0, 3, -3, 0, 9])
    assert rounds[0] == [0, 3] and [*chain(*rounds)] == [0, 3, 1, 2, 4]


def test_in_deterministic_mode_all_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds_of(monkeypatch, [2, -1, 0], all_at_once=True) == [[0, 1, 2]]


@pytest.mark.parametrize("all_at_once", [False, True])
def test_when_the_time_is_over_those_that_are_done_come_before_the_error(
    monkeypatch: pytest.MonkeyPatch, all_at_once: bool
) -> None:
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"0 of 3 groups are ready after 1 s, 1 are under way"):
        rounds_of(monkeypatch, [100, 1, 0], timeout=1, all_at_once=all_at_once)
    assert time.monotonic() - began < allowed(10)

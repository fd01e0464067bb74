"""Log-probs of groups that are finished while others are generated: the same columns as by one call at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.arguments import parse
from instep.controller.early import scores_early
from instep.controller.round import TrainingRound
from instep.controller.watch import Watch
from instep.errors import WorkerError
from instep.types import Group, Sample
from tests.command_line import argv, make_folder
from tests.unit.test_role import Ranks, args_of, role, scores

EARLY: dict[str, Any] = dict(
    offload_train=False, offload_rollout=False, deterministic_mode=False, use_routing_replay=False,
    custom_megatron_before_log_prob_hook_path=None, num_steps_per_rollout=2,
)  # fmt: skip


class Noting(Ranks):
    """Two ranks that note which samples each call scores."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def start(self, call: str, *, timeout: float, per_rank: list[tuple[Any, ...]]) -> Any:
        if call == "log_probs":
            assert len({len(micro_batches) for _, micro_batches, _ in per_rank}) == 1, "the ranks wait for each other"
            self.calls.append(sorted(i for batch, *_ in per_rank for i in batch.sample_columns["index"].tolist()))
        return super().start(call, timeout=timeout, per_rank=per_rank)


def make_groups(sizes: list[int]) -> list[Group]:
    groups: list[Group] = []
    for number, size in enumerate(sizes):
        groups.append([])
        for i in range(sum(sizes[:number]), sum(sizes[:number]) + size):
            sample = Sample(group_index=number, index=i, reward=float(i % 2), tokens=[1, i])
            sample.status = Sample.Status.COMPLETED
            sample.append_response_tokens(list(range(1 + i % 5)), [-1.0] * (1 + i % 5))
            groups[-1].append(sample)
    return groups


def training(ranks: Ranks, **more: Any) -> TrainingRound:
    args = args_of(**EARLY | more)
    return TrainingRound(args, args, role(args, ranks))


@pytest.mark.parametrize(
    ("sizes", "before", "calls"),
    [
        ([4, 4, 4], [], [[*range(12)]]),
        ([4, 4, 4], [[1]], [[4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 10, 11]]),
        ([4, 4, 4], [[2], [0], [1]], [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]),
        ([4, 4, 4], [[2, 0]], [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]),
        ([3, 5, 4], [[0]], [[*range(12)]]),  # two ranks cannot share three samples
        ([3, 5, 4], [[0], [1]], [[*range(8)], [8, 9, 10, 11]]),
        ([3, 5, 4], [[2, 0]], [[8, 9, 10, 11], [*range(8)]]),
    ],
)
def test_each_sample_is_scored_once_and_its_column_is_that_of_one_call(
    sizes: list[int], before: list[list[int]], calls: list[list[int]]
) -> None:
    groups, ranks = make_groups(sizes), Noting()
    round_ = training(ranks)
    early = round_.early_scores(critic_only=False)
    assert early is not None
    for finished in before:
        for i in finished:
            early.add(groups[i])
        early.score()
    out = round_.run(groups, 0, early=early)
    assert torch.equal(out.batch.token_columns["log_probs"], scores(out.batch))
    assert ranks.calls == calls


@pytest.mark.parametrize(
    ("changed", "left"),
    [((1, 2), [1, 2, 4, 5, 6, 7]), ((1,), [0, 1, 4, 5, 6, 7]), ((), [4, 5, 6, 7]), ((0, 1, 2, 3), [*range(8)])],
)
def test_what_a_hook_has_changed_is_scored_again_with_as_many_others_as_ranks_need(
    changed: tuple[int, ...], left: list[int]
) -> None:
    groups, ranks = make_groups([4, 4]), Noting()
    round_ = training(ranks)
    early = round_.early_scores(critic_only=False)
    assert early is not None
    early.add(groups[0])
    early.score()
    for i in changed:
        if i % 2:
            groups[0][i].tokens[-1] = 77
        else:
            groups[0][i].sampling_params = {"temperature": 0.5}
    groups[0][3].remove_sample = True  # it is scored as it was
    out = round_.run(groups, 0, early=early)
    assert ranks.calls == [[0, 1, 2, 3], left]
    assert torch.equal(out.batch.token_columns["log_probs"], scores(out.batch))


def test_a_sample_that_cannot_be_trained_on_is_left_to_the_training() -> None:
    groups, ranks = make_groups([4]), Noting()
    early = training(ranks).early_scores(critic_only=False)
    assert early is not None
    tokens, groups[0][0].tokens = groups[0][0].tokens, []
    early.add(groups[0])
    early.score()
    groups[0][0].tokens = tokens  # by a hook that ends the rollout, say
    out = training(ranks, global_batch_size=2).run(groups, 0, early=early)
    assert ranks.calls == [[0, 1, 2, 3]] and torch.equal(out.batch.token_columns["log_probs"], scores(out.batch))


def test_nothing_is_scored_early_that_is_not_needed() -> None:
    assert training(Ranks(), num_steps_per_rollout=1).early_scores(critic_only=False) is None
    assert training(Ranks()).early_scores(critic_only=True) is None


@pytest.mark.parametrize(
    ("words", "early"),
    [
        ("train --device cpu --rollout-num-gpus 1", True),
        ("train --device cpu --colocate", True),
        ("train --device cuda --rollout-num-gpus 1", True),
        ("train --device cuda --colocate", False),
        ("train --device cuda --colocate --no-offload-train", False),  # what it needs are the engines' caches now
        ("train --device cuda --colocate --no-offload-train --no-offload-rollout", True),
        ("train --device cuda --colocate --weight-sync single-copy", True),
        ("train --device cpu --rollout-num-gpus 1 --deterministic-mode", False),
        ("train-async --device cpu --rollout-num-gpus 1", False),
    ],
)
def test_the_trainer_must_be_there_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, early: bool
) -> None:
    make_folder(tmp_path, monkeypatch)
    command, flags = words.split(" ", 1)
    assert scores_early(parse(argv(flags), command)) is early


def test_a_trainer_that_dies_while_it_scores_ends_the_rollout() -> None:
    watch, calls = Watch(lambda: None, ""), []

    def score() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise WorkerError("actor rank 0 died", where="here", remedy="run again")

    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 died"):
        watch.run(lambda: time.sleep(20), timeout=30, what="rollout 0", meanwhile=score)
    assert len(calls) == 2 and time.monotonic() - began < 10

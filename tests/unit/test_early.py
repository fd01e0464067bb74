"""Log-probs of groups that are finished while others are generated: the same columns as by one call at the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.algorithms.catalog import DEFAULT_ROLLOUT
from instep.arguments.parse import parse
from instep.controller.early_step import OF_ALL, scores_early, why_not
from instep.controller.round import TrainingRound
from instep.controller.watch import Watch
from instep.errors import WorkerError
from instep.types import Group, Sample, TokenBatch
from tests.bounds import allowed
from tests.command_line import argv, make_folder
from tests.unit.test_role import Ranks, args_of, role, scores

EARLY: dict[str, Any] = dict(
    device="cpu", offload_train=False, offload_rollout=False, deterministic_mode=False, use_routing_replay=False,
    custom_megatron_before_log_prob_hook_path=None, num_steps_per_rollout=2, rollout_batch_size=3,
    moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, moe_router_bias_update_rate=0.0, megatron_overrides={},
    **dict.fromkeys(OF_ALL), rollout_function_path=DEFAULT_ROLLOUT,
)  # fmt: skip


class Noting(Ranks):
    """Two ranks that note which samples each call scores."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.trained: list[tuple[str, list[int]]] = []

    def begin_step(self, batch: TokenBatch, micro_batches: Any, token: str) -> dict[int, torch.Tensor]:
        return dict(enumerate(torch.stack([scores(batch)] * 2).split(batch.response_lengths.tolist(), 1)))

    def start(self, call: str, *, timeout: float, per_rank: list[tuple[Any, ...]]) -> Any:
        if call in ("begin_step", "train"):
            batches = [words[0] for words in per_rank]
            self.trained.append((call, sorted(i for b in batches for i in b.sample_columns["index"].tolist())))
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
    early = round_.early(0, 0)
    assert early is not None
    for finished in before:
        for i in finished:
            early.add(groups[i])
        early.work()
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
    early = round_.early(0, 0)
    assert early is not None
    early.add(groups[0])
    early.work()
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
    early = training(ranks).early(0, 0)
    assert early is not None
    tokens, groups[0][0].tokens = groups[0][0].tokens, []
    early.add(groups[0])
    early.work()
    groups[0][0].tokens = tokens  # by a hook that ends the rollout, say
    out = training(ranks, global_batch_size=2).run(groups, 0, early=early)
    assert ranks.calls == [[0, 1, 2, 3]] and torch.equal(out.batch.token_columns["log_probs"], scores(out.batch))


def test_nothing_is_computed_early_that_is_not_needed() -> None:
    early = training(Ranks(), num_steps_per_rollout=1).early(0, 0)
    assert early is not None and early.metrics() == {"perf/early_train_seconds": 0.0}
    assert training(Ranks(), num_steps_per_rollout=1, normalize_advantages=True).early(0, 0) is None
    assert training(Ranks()).early(0, 0, critic_only=True) is None


ONE_STEP: dict[str, Any] = dict(num_steps_per_rollout=1, global_batch_size=12, max_tokens_per_gpu=6)


@pytest.mark.parametrize(
    ("finished", "trained"),
    [
        ([], [("train", [*range(12)])]),
        ([[1], [0]], [("begin_step", [4, 5, 6, 7]), ("begin_step", [0, 1, 2, 3]), ("train", [8, 9, 10, 11])]),
        ([[1, 0]], [("begin_step", [*range(8)]), ("train", [8, 9, 10, 11])]),
        ([[1], [0, 2]], [("begin_step", [4, 5, 6, 7]), ("train", [0, 1, 2, 3, 8, 9, 10, 11])]),  # the last ones
    ],
)
def test_the_last_groups_are_left_for_the_end(finished: list[list[int]], trained: list[Any]) -> None:
    groups, ranks = make_groups([4, 4, 4]), Noting()
    round_ = training(ranks, **ONE_STEP)
    early = round_.early(0, 0)
    assert early is not None
    for numbers in finished:
        for i in numbers:
            early.add(groups[i])
        early.work()
    out = round_.run(groups, 0, [0, 5, 10], early=early)
    assert ranks.trained == trained
    assert {i: set(row.tolist()) for i, row in out.log_probs.items()} == {0: {0.0}, 5: {-5.0}, 10: {-10.0}}


def test_groups_wait_until_they_fill_a_micro_batch_of_each_rank() -> None:
    groups, ranks = make_groups([4, 4, 4]), Noting()
    early = training(ranks, **ONE_STEP | {"max_tokens_per_gpu": 15}).early(0, 0)
    assert early is not None
    for group in groups[:2]:
        early.add(group)
        early.work()
    assert ranks.trained == [("begin_step", [*range(8)])]


def test_what_was_begun_with_a_sample_that_has_changed_is_computed_again() -> None:
    for change in "tokens", "reward", "loss_mask", "gone", "rollout_log_probs":
        groups, ranks = make_groups([4, 4, 4]), Noting()
        round_ = training(ranks, **ONE_STEP)
        early = round_.early(0, 0)
        assert early is not None
        early.add(groups[0])
        early.work()
        sample = groups[0][1]
        if change == "tokens":
            sample.tokens[-1] = 77
        elif change == "reward":
            sample.reward = 0.5
        elif change == "loss_mask":
            sample.remove_sample = True
        elif change == "gone":
            groups[0] = make_groups([4])[0]
        else:
            sample.rollout_log_probs = [-2.0] * sample.response_length
        round_.run(groups, 0, early=early)
        assert ranks.trained == [("begin_step", [0, 1, 2, 3]), ("train", [*range(12)])], change


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", ""),
        ("--advantage-estimator rloo --kl-coef 0.1 --calculate-per-token-loss --use-tis", ""),
        ("--over-sampling-batch-size 8 --dynamic-sampling-filter-path instep.rollout.filters.keep", ""),
        ("--num-steps-per-rollout 2", "several steps"),
        ("--advantage-estimator reinforce_plus_plus", "whitened"),
        ("--normalize-advantages", "whitened"),
        ("--advantage-estimator ppo", "critic"),
        ("--deterministic-mode", "one call"),
        ("--colocate --device cuda", "take turns"),
        ("--loss-type custom_loss --custom-loss-function-path tests.loss_hooks.ppo_loss", "of the user"),
        ("--custom-reward-post-process-path tests.loss_hooks.ppo_loss", "all samples"),
        ("--rollout-function-path tests.loss_hooks.ppo_loss", "rollout function"),
        ("--rollout-sample-filter-path tests.loss_hooks.ppo_loss", "all samples"),
        ("--rollout-data-postprocess-path tests.loss_hooks.ppo_loss", "all samples"),
        ("--train-backend megatron --moe-aux-loss-coeff 0.01", "routers"),
        ("--use-opd --opd-type engine --opd-kl-coef 1 --opd-teacher-url http://127.0.0.1:9", "served model"),
    ],
)
def test_why_a_step_cannot_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, reason: str) -> None:
    make_folder(tmp_path, monkeypatch)
    place = "" if "--colocate" in flags else "--device cpu --rollout-num-gpus 1 "
    found = why_not(parse(argv(place + flags), "train"))
    assert reason in found and bool(reason) == bool(found)


def test_ranks_share_what_was_begun_and_what_is_left_evenly() -> None:
    args = args_of(**EARLY | {"num_steps_per_rollout": 1, "global_batch_size": 9})
    assert "evenly" in why_not(args, 2) and not why_not(args, 3)


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


def test_nothing_is_begun_once_the_rollout_has_ended() -> None:
    """The work ends while its processes are looked at."""
    calls: list[int] = []
    end = threading.Event()

    def check() -> None:
        end.set()
        for thread in threading.enumerate():
            if thread.name == "it":
                thread.join(30)

    Watch(check, "").run(lambda: end.wait(30), timeout=60, what="it", meanwhile=lambda: calls.append(1))
    assert end.is_set() and not calls


def test_a_trainer_that_dies_while_it_scores_ends_the_rollout() -> None:
    watch, calls = Watch(lambda: None, ""), []

    def score() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise WorkerError("actor rank 0 died", where="here", remedy="run again")

    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 died"):
        watch.run(lambda: time.sleep(20), timeout=30, what="rollout 0", meanwhile=score)
    assert len(calls) == 2 and time.monotonic() - began < allowed(10)

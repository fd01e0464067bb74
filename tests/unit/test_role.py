"""A role's share of a round over two data-parallel ranks: what each of them gets, and where its answers go."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.data.batch import build_batch
from instep.training.backend import ParallelInfo
from instep.training.context_parallel import share_of
from instep.training.lr_schedule import LRSchedule
from instep.types import Group, Sample, TokenBatch

LENGTHS = [2, 9, 3, 8, 1, 7, 4, 6]
SCHEDULE = LRSchedule(lr=1.0, decay=8)


class Ranks:
    """Two ranks that answer for every token of sample i with -i, and note their learning rates."""

    role = "actor"

    def __init__(self) -> None:
        self.lrs: list[list[float]] = []

    def start(self, call: str, *, timeout: float, per_rank: list[tuple[Any, ...]]) -> Any:
        return lambda: [getattr(self, call)(*words) for words in per_rank]

    def log_probs(self, batch: TokenBatch, micro_batches: list[list[int]], names: list[str]) -> dict[str, torch.Tensor]:
        order = [i for indices in micro_batches for i in indices]
        return {name: scores(batch.select(order)) for name in names}

    def train(self, batch: TokenBatch, steps: Any, lrs: list[float], keep: list[int], *_: Any) -> Any:
        self.lrs.append(lrs)
        rows = scores(batch).split(batch.response_lengths.tolist())
        kept = {i: torch.stack([rows[i], rows[i] - 1]) for i in keep}
        return [{"skipped_steps": 0.0, "lr": lr} for lr in lrs], kept, None


def scores(batch: TokenBatch) -> torch.Tensor:
    return -batch.sample_columns["index"].float().repeat_interleave(batch.response_lengths)


def args_of(**more: Any) -> Any:
    values = dict(
        command="train", advantage_estimator="grpo", use_dynamic_batch_size=True, max_tokens_per_gpu=12,
        balance_data=True, balance_by_flops=False, hf_checkpoint=None, global_batch_size=4, train_timeout=10.0,
        overlong_buffer_len=None, kl_coef=0.0,
        custom_advantage_function_path=None, custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None, rollout_data_postprocess_path=None, normalize_advantages=False,
        rewards_normalization=True, grpo_std_normalization=True, loss_type="policy_loss", use_kl_loss=False,
        use_rollout_logprobs=False, use_opd=False, ref_served_model=None, reward_key=None, rollout_temperature=1.0,
        use_rollout_routing_replay=False,
        calculate_per_token_loss=False, constant_loss_length=None, use_tis=False, use_rs=False, gamma=1.0, lambd=1.0,
    )  # fmt: skip
    return SimpleNamespace(**values | more)


@pytest.fixture
def groups() -> list[Group]:
    """Two groups of four, of two steps."""
    samples = []
    for i, length in enumerate(LENGTHS):
        sample = Sample(group_index=i // 4, index=i, reward=float(i % 2), tokens=[1], status=Sample.Status.COMPLETED)
        sample.append_response_tokens(list(range(length)), [-1.0] * length)
        samples.append(sample)
    return [samples[:4], samples[4:]]


def role(args: Any, ranks: Ranks, **more: int) -> RoleTrainer:
    layout = [ParallelInfo(rank=rank, world_size=2, dp_rank=rank, dp_size=2, **more) for rank in range(2)]
    return RoleTrainer(args, ranks, layout, SCHEDULE)  # type: ignore[arg-type]


def test_context_parallel_ranks_share_the_tokens_of_a_micro_batch_and_pipelines_say_how_many_there_are(
    groups: list[Group],
) -> None:
    batch = build_batch(groups)
    for more, counts in ({}, [2, 1]), ({"cp_size": 2}, [1, 1]), ({"micro_batch_multiple": 2}, [2, 2]):
        schedule = role(args_of(), Ranks(), **more).plan(batch)
        assert [[len(rank) for rank in step] for step in schedule] == [[n, n] for n in counts], more


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_compute_at_most_the_tokens_of_a_gpu_also_of_short_samples(
    seed: int, cp_size: int
) -> None:
    """Samples are padded to 2 x CP chunks of equally many tokens."""
    rng = random.Random(seed)
    lengths = torch.tensor([rng.choice([2, 3, rng.randint(2, 9), rng.randint(2, 90)]) for _ in range(32)])
    columns = {"execution_id": list(range(32)), "temperature": [1.0] * 32}
    batch = TokenBatch(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, lengths - 1, {}, columns)
    args = args_of(max_tokens_per_gpu=24, global_batch_size=16, balance_by_flops=bool(seed % 2))
    schedule = role(args, Ranks(), cp_size=cp_size).plan(batch)
    assert sorted(i for step in schedule for rank in step for m in rank for i in m) == list(range(32))
    for step in schedule:
        assert len({len(rank) for rank in step}) == 1
        for members in (m for rank in step for m in rank):
            shares = [share_of(batch.select(members), rank, cp_size) for rank in range(cp_size)]
            assert len({s.rows.numel() for s in shares}) == 1
            assert shares[0].rows.numel() <= 24 or len(members) == 1
            assert sum(s.own.numel() for s in shares) == int((lengths[members] - 1).sum())


def test_ranks_get_equal_flops_which_are_those_of_the_model(tmp_path: Path) -> None:
    """Attention costs more than all else."""
    Qwen3Config(hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=32, vocab_size=9,
                num_key_value_heads=2, head_dim=64).save_pretrained(tmp_path)  # fmt: skip
    rng = random.Random(0)
    lengths = torch.tensor([rng.randint(2, 3000) for _ in range(16)])
    columns = {"execution_id": list(range(16)), "temperature": [1.0] * 16}
    batch = TokenBatch(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, lengths - 1, {}, columns)
    spread = []
    for folder in None, str(tmp_path):
        args = args_of(max_tokens_per_gpu=3000, global_batch_size=16, hf_checkpoint=folder)
        (step,) = role(args, Ranks()).plan(batch)
        squares = [sum(int(lengths[i]) ** 2 for m in rank for i in m) for rank in step]
        spread.append(max(squares) / min(squares))
    assert spread[1] < 1.02 < 1.1 < spread[0], spread


def test_scores_of_the_ranks_go_to_their_samples(groups: list[Group]) -> None:
    actor, batch = role(args_of(), Ranks()), build_batch(groups)
    schedule = actor.plan(batch)
    by_rank = [[i for step in schedule for m in step[rank] for i in m] for rank in range(2)]
    assert by_rank == [[0, 1, 4, 5], [2, 3, 6, 7]]
    actor.score(batch, schedule, ["log_probs"])()
    assert torch.equal(batch.token_columns["log_probs"], scores(batch))


@pytest.mark.parametrize("scored", [True, False])
def test_kept_rows_are_those_of_the_samples_asked_for(groups: list[Group], scored: bool) -> None:
    """The log-prob of a later step is no more that of the weights which sampled."""
    args = args_of(use_rollout_logprobs=not scored)  # then the old log-probs are not scored first
    keep = [6, 3, 0]
    out = TrainingRound(args, args, role(args, Ranks())).run(groups, 0, keep)
    assert ("log_probs" in out.batch.token_columns) == scored
    before = keep if scored else keep[1:]
    assert {i: row.tolist() for i, row in out.log_probs.items()} == {i: [-float(i)] * LENGTHS[i] for i in before}
    assert {i: row.tolist() for i, row in out.entropies.items()} == {i: [-1.0 - i] * LENGTHS[i] for i in keep}


def test_the_learning_rate_goes_on_from_round_to_round(groups: list[Group]) -> None:
    ranks = Ranks()
    actor, batch = role(args_of(), ranks), build_batch(groups)
    steps, _ = actor.train(batch, actor.plan(batch), 2)()
    assert ranks.lrs == [[0.75, 0.625]] * 2 and [step["lr"] for step in steps] == [0.75, 0.625]

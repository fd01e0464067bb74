"""A training round as far as the workers, which are recorded: what they are asked to score and get to train on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.controller.round_metrics import staleness_metrics
from instep.controller.trainer import num_steps_of_run
from instep.errors import ConfigError, RolloutError
from instep.training import lr_schedule
from instep.training.backend import TokenOutputs
from instep.training.losses import finish_metrics, loss_fn_from_args
from instep.types import Group, Sample, Status, TokenBatch, VersionSpan
from tests.assets import make_checkpoint, make_prompts


class Workers:
    """Workers of one rank that note what they are asked for; every log-prob of theirs is -2."""

    role = "actor"

    def __init__(self) -> None:
        self.scored: list[str] = []
        self.batch: TokenBatch | None = None

    def start(self, call: str, *, timeout: float, per_rank: list[tuple[Any, ...]]) -> Any:
        batch, parts, names = per_rank[0][:3]
        if call == "log_probs":
            self.scored += names
            return lambda: [{name: torch.full((int(batch.response_lengths.sum()),), -2.0) for name in names}]
        self.batch = batch
        return lambda: [([{"skipped_steps": 0.0}] * len(parts), {}, None)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("round")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 4)
    return folder


def arguments(root: Path, *flags: str) -> Any:
    words = f"--hf-checkpoint {root}/hf --actor-num-gpus-per-node 1 --prompt-data {root}/train.jsonl --num-rollout 4"
    words += " --input-key prompt --rm-type math --label-key label --rollout-batch-size 2 --n-samples-per-prompt 4"
    return parse([*words.split(), *flags])


def rollout(sampling_params: dict[str, Any] | None = None) -> list[Group]:
    """Two groups of four; the first three tokens of sample 0 come from version 6, all others from version 7."""
    groups: list[Group] = [[], []]
    for i in range(8):
        sample = Sample(group_index=i // 4, index=i, tokens=[4, 5], reward=float(i % 2), status=Status.COMPLETED)
        spans = [VersionSpan("6", 0, 3), VersionSpan("7", 3, 5)] if i == 0 else [VersionSpan("7", 0, 5)]
        sample.append_response_tokens(range(6, 11), [-1.0, -1.5, -2.5, -1.0, -1.0], weight_versions=spans)
        sample.sampling_params = sampling_params or {}
        groups[i // 4].append(sample)
    return groups


def trained(args: Any, groups: list[Group], version: int = 7) -> Workers:
    workers = Workers()
    layout = [SimpleNamespace(dp_rank=0, dp_size=1, cp_size=1, micro_batch_multiple=1)]
    actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 10))  # type: ignore[arg-type]
    TrainingRound(args, args.view({}), actor).run(groups, 0, version=version)
    return workers


@pytest.mark.parametrize(("num_steps", "scored"), [(1, []), (2, ["log_probs"]), (4, ["log_probs"])])
def test_old_log_probs_are_scored_from_two_steps_on(root: Path, num_steps: int, scored: list[str]) -> None:
    assert trained(arguments(root, "--num-steps-per-rollout", str(num_steps)), rollout()).scored == scored


def test_a_sample_without_parameters_has_the_temperature_of_the_run(root: Path) -> None:
    batch = trained(arguments(root, "--rollout-temperature", "0.5"), rollout()).batch
    assert batch is not None and batch.sample_columns["temperature"].tolist() == [0.5] * 8


@pytest.mark.parametrize("flag", ["--use-tis", "--use-rs", "--use-rollout-logprobs"])
def test_a_truncated_sample_is_refused_where_its_log_probs_are_compared(root: Path, flag: str) -> None:
    with pytest.raises(RolloutError, match=f"top_k 5.*{flag} compares"):
        trained(arguments(root, flag), rollout({"top_k": 5}))
    assert trained(arguments(root), rollout({"top_k": 5})).batch is not None


# ---- tokens of older weights -----------------------------------------------------------------------------------------


def gradient(args: Any, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Of the loss by the log-probs, which are -2 everywhere, over the loss weight; and the metrics."""
    log_probs = torch.full_like(batch.token_columns["loss_mask"], -2.0, requires_grad=True)
    batch.token_columns["advantages"] = torch.ones_like(log_probs)
    out = loss_fn_from_args(args)(batch, TokenOutputs(log_probs, torch.ones_like(log_probs)))
    out.loss.backward()
    assert log_probs.grad is not None
    sums = {name: float(value) for name, value in out.sums.items()}
    maxes = {name: float(value) for name, value in out.maxes.items()}
    return -log_probs.grad / batch.token_columns["loss_weights"], finish_metrics(sums, maxes)


@pytest.mark.parametrize("flags", [(), ("--num-steps-per-rollout", "2")])
def test_tokens_of_older_weights_have_the_engines_log_prob_as_their_old_one(root: Path, flags: tuple[str, ...]) -> None:
    args = arguments(root, *flags, "--eps-clip", "0.99", "--eps-clip-high", "9")
    batch = trained(args, rollout()).batch
    assert batch is not None and batch.token_columns["older"].tolist() == [1, 1, 1] + [0] * 37
    ratios, metrics = gradient(args, batch)
    assert ratios.tolist() == pytest.approx([math.exp(x) for x in (-1, -0.5, 0.5)] + [1] * 37)
    # They are no measure of how well trainer and engine agree.
    assert metrics["log_prob_gap_coverage"] == pytest.approx(37 / 40) and metrics["log_prob_gap_max"] == 1.0
    assert metrics["log_prob_gap_mean"] == pytest.approx((7 * 4 + 2) / 37)


def test_tokens_whose_version_nobody_tells_are_of_that_which_their_group_began_under(root: Path) -> None:
    groups = rollout()
    for sample, begun in zip(groups[1], [6, 7, None, 6], strict=True):
        sample.weight_versions, sample.begun_version = [], begun
    groups[1][3].weight_versions = [VersionSpan("7", 2, 5)]
    batch = trained(arguments(root), groups).batch
    assert batch is not None
    assert batch.token_columns["older"].split(5)[4].tolist() == [1] * 5
    assert batch.token_columns["older"].split(5)[7].tolist() == [1, 1, 0, 0, 0]
    assert batch.token_columns["older"].sum() == 3 + 5 + 2
    assert batch.token_columns["fresh"].split(5)[5].sum() == 0  # though it can be no older, nobody has said so
    of_version = {6: 3 + 5 + 2, 7: 2 + 15 + 5 + 3}
    shares = {f"async/staleness_ratio/{8 - v}": n / 35 for v, n in of_version.items()}
    assert shares.items() <= staleness_metrics(batch, 8).items()


def test_truncated_samples_of_older_weights_are_no_base_of_a_ratio(root: Path) -> None:
    batch = trained(arguments(root), rollout({"min_p": 0.1})).batch
    assert batch is not None and "older" not in batch.token_columns


def test_importance_weights_correct_for_older_weights_themselves(root: Path) -> None:
    args = arguments(root, "--use-tis", "--tis-clip", "9")
    batch = trained(args, rollout()).batch
    assert batch is not None
    ratios, _ = gradient(args, batch)
    assert ratios[:5].tolist() == pytest.approx([math.exp(x) for x in (-1, -0.5, 0.5, -1, -1)])


def test_nothing_is_older_in_a_replay_or_without_known_log_probs(root: Path) -> None:
    replayed = trained(arguments(root), rollout(), version=0).batch
    groups = rollout()
    groups[0][0].rollout_log_probs = None
    unknown = trained(arguments(root), groups).batch
    assert replayed is not None and unknown is not None
    assert "older" not in replayed.token_columns and "older" not in unknown.token_columns


# ---- the horizon of the learning rate, and a mask that could never act -----------------------------------------------


STEPS = [("", 4), ("--global-batch-size 4", 8), ("--num-steps-per-rollout 2", 8)]


@pytest.mark.parametrize(("flags", "num_steps"), STEPS)
def test_the_learning_rate_ends_with_the_last_optimizer_step(root: Path, flags: str, num_steps: int) -> None:
    args = arguments(root, *flags.split(), "--lr", "1e-3", "--lr-decay-style", "linear", "--min-lr", "0")
    assert num_steps_of_run(args, 4) == num_steps
    schedule = lr_schedule.from_args(args, num_steps_of_run(args, 4))
    assert schedule.lr_at(num_steps) == 0 < schedule.lr_at(num_steps - 1)


def test_a_sequence_mask_that_could_never_act_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="--use-opsm"):
        arguments(root, "--use-opsm")
    for more in (("--num-steps-per-rollout", "2"), ("--use-rollout-logprobs",), ("--partial-rollout",)):
        assert arguments(root, "--use-opsm", *more).use_opsm

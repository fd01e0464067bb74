"""Runs of the `hf` backend with tensor parallelism, moments in 8 bits and selective recomputation, as a user starts
them."""

from pathlib import Path

import pytest

from tests.e2e.commands import grpo_arguments, run, sft_arguments
from tests.e2e.test_train import rows

TP = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
SLIM = ["--optimizer", "adamw_8bit", "--optimizer-cpu-offload", "--recompute-granularity", "selective"]
STEPS = ["--num-rollout", "3", "--num-steps-per-rollout", "2"]


def steps_of(arguments: list[str]) -> list[dict[str, float]]:
    """The metrics of a run's training."""
    done = run(arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = arguments[arguments.index("--run-dir") + 1]
    return [row for row in rows(Path(folder) / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.slow
def test_two_ranks_that_share_layers_sync_and_train_as_one_does(tiny, tmp_path):
    """The engine agrees with the two ranks in each sync, and one rank makes the same steps of the same rollouts."""
    template = str(tmp_path / "rollout-{rollout_id}.pt")
    two = steps_of(grpo_arguments(tiny, tmp_path / "two", *STEPS, *TP, "--save-debug-rollout-data", template))
    assert all(row["sync/probe_max_abs_diff"] < 1e-4 and row["train/log_prob_gap_mean"] < 1e-4 for row in two)
    one = steps_of(grpo_arguments(tiny, tmp_path / "one", *STEPS, "--load-debug-rollout-data", template))
    assert len(one) == len(two) >= 3
    for ours, theirs in zip(two, one, strict=True):
        names = [name for name in theirs if name.startswith("train/") and "seconds" not in name]
        assert {"train/loss", "train/grad_norm", "train/entropy"} <= set(names)
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_a_slim_optimizer_trains_syncs_and_goes_on(tiny, tmp_path):
    more = [*TP, *SLIM, "--save", str(tmp_path / "save"), "--save-hf", str(tmp_path / "hf")]
    steps_of(grpo_arguments(tiny, tmp_path / "run", *more, "--num-rollout", "2"))
    found = steps_of(grpo_arguments(tiny, tmp_path / "run", *more, "--num-rollout", "3", "--load", more[-3]))
    assert len(found) == 3 and all(row["sync/probe_max_abs_diff"] < 1e-4 for row in found)
    assert steps_of(grpo_arguments(tiny, tmp_path / "next", "--hf-checkpoint", more[-1], "--num-rollout", "1"))


def sft_losses(tiny: Path, run_dir: Path, *more: str) -> list[float]:
    options = ["--rollout-batch-size", "64", "--global-batch-size", "16", "--num-rollout", "6", "--lr", "3e-3"]
    options += ["--lr-decay-style", "constant", "--micro-batch-size", "16", *more]
    return [row["train/loss"] for row in steps_of(sft_arguments(tiny, run_dir, *options))]


@pytest.mark.slow
def test_moments_in_8_bits_learn_as_those_of_fp32_do(tiny, tmp_path):
    exact, eight = sft_losses(tiny, tmp_path / "32"), sft_losses(tiny, tmp_path / "8", *SLIM)
    assert len(exact) == len(eight) == 6 and eight[-1] < 0.6 * eight[0]
    assert eight == pytest.approx(exact, rel=0.05) and eight != exact

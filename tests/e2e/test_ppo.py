"""PPO with its critic as a user runs it: two groups of worker processes, checkpoints, resumes."""

import json
import math

import pytest

from instep.preflight.doctor.run_dir import check_run
from tests.documented import undocumented
from tests.e2e.commands import grpo_arguments, run

TASK = ["--custom-rm-path", "tests.e2e.observed.reward", "--rollout-batch-size", "16", "--lr", "3e-3"]
PPO = ["--advantage-estimator", "ppo", "--critic-lr", "5e-3", "--gamma", "1", "--lambd", "0.95"]
NUM_ROLLOUT, CRITIC_ONLY = 8, 2


def rows(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "critic/value_loss" in row]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """One run that saves at its end: the critic alone for 2 rollouts, then both, 4 steps a rollout; and its output."""
    run_dir = tmp_path_factory.mktemp("ppo")
    more = [*TASK, *PPO, "--num-rollout", str(NUM_ROLLOUT), "--num-critic-only-steps", str(CRITIC_ONLY)]
    more += ["--num-steps-per-rollout", "4", "--kl-coef", "0.01", "--kl-loss-type", "k2", "--normalize-advantages"]
    more += ["--save", str(run_dir / "ckpt"), "--critic-save", str(run_dir / "critic"), "--micro-batch-size", "16"]
    done = run(grpo_arguments(tiny, run_dir, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, done.stdout


def test_it_learns(trained):
    steps = rows(trained[0])
    assert [row["step"] for row in steps] == list(range(NUM_ROLLOUT))
    assert steps[-1]["rollout/reward_mean"] > steps[0]["rollout/reward_mean"] + 0.2
    assert steps[0]["critic/values_mean"] == steps[0]["critic/explained_variance"] == 0.0
    assert steps[-1]["critic/explained_variance"] > 0.1
    assert steps[-1]["critic/values_mean"] == pytest.approx(steps[-1]["critic/returns_mean"], abs=0.1)
    for row in steps:
        for name in "value_loss value_clipfrac grad_norm lr values_mean returns_mean explained_variance".split():
            assert math.isfinite(row[f"critic/{name}"]), name
        assert row["critic/lr"] == 5e-3 and row["critic/skipped_steps"] == 0
    assert max(row["critic/value_clipfrac"] for row in steps) > 0


def test_every_metric_is_documented(trained):
    found = {name for line in (trained[0] / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"critic/value_loss", "train/reward_kl"} <= found and undocumented(found) == set()


def test_the_critic_alone_leaves_the_actor_as_it_is(trained):
    run_dir, _ = trained
    steps = rows(run_dir)
    assert ["train/loss" in row for row in steps] == [n >= CRITIC_ONLY for n in range(NUM_ROLLOUT)]
    assert [row["sync/version"] for row in steps] == list(range(2, NUM_ROLLOUT + 2))
    state = json.loads((run_dir / "ckpt" / "iter_0000007" / "run_state.json").read_text())
    assert (state["num_steps"], state["num_critic_steps"]) == (4 * (NUM_ROLLOUT - CRITIC_ONLY), 4 * NUM_ROLLOUT)
    assert json.loads((run_dir / "summary.json").read_text())["num_steps"] == state["num_steps"]


def test_the_critic_is_part_of_the_checkpoint_and_lies_in_its_own_folder(trained):
    run_dir, stdout = trained
    assert "and a value head of zeros" in stdout
    whole, alone = run_dir / "ckpt" / "iter_0000007" / "critic", run_dir / "critic" / "iter_0000007" / "critic"
    names = sorted(p.name for p in whole.iterdir())
    assert ".metadata" in names and "rng_0.pt" in names and sorted(p.name for p in alone.iterdir()) == names
    assert [n for n in names if (whole / n).read_bytes() != (alone / n).read_bytes()] == []
    assert (run_dir / "critic" / "latest_checkpointed_iteration.txt").read_text() == "7"
    checks = check_run(run_dir)
    assert [(c.status, c.text) for c in checks if c.name == "iter_0000007"] == [("ok", "complete")]
    listed = json.loads((run_dir / "ckpt" / "iter_0000007" / "files.json").read_text())
    assert "critic/.metadata" in listed["files"]
    assert {p.name for p in (run_dir / "logs").iterdir()} >= {"actor-rank0.log", "critic-rank0.log"}


@pytest.mark.slow
def test_a_trained_critic_serves_another_run(trained, tiny, tmp_path):
    run_dir, _ = trained
    more = [*TASK, *PPO, "--num-rollout", "1", "--critic-load", str(run_dir / "critic")]
    done = run(grpo_arguments(tiny, tmp_path, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"the critic begins with {run_dir / 'critic' / 'iter_0000007' / 'critic'}" in done.stdout
    assert "value head of zeros" not in done.stdout
    assert rows(tmp_path)[0]["critic/values_mean"] > 0.1


@pytest.mark.slow
def test_a_grpo_run_goes_on_with_ppo_and_a_critic_of_its_own(tiny, tmp_path):
    """The actor's checkpoint has no critic: the new one has the transformer of that actor."""
    ckpt = ["--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt")]
    first = run(grpo_arguments(tiny, tmp_path / "run", *ckpt, "--num-rollout", "1"))
    assert first.returncode == 0, first.stderr[-3000:]
    more = [*ckpt, "--num-rollout", "2", "--advantage-estimator", "ppo", "--critic-load", str(tmp_path / "ckpt")]
    done = run(grpo_arguments(tiny, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'changed since the checkpoint: --advantage-estimator was "grpo" and is "ppo"' in done.stdout
    assert f"the critic begins with {tmp_path / 'ckpt' / 'iter_0000000'}, and a value head of zeros" in done.stdout
    (row,) = rows(tmp_path / "run")
    assert row["step"] == 1 and row["critic/values_mean"] == 0.0


@pytest.mark.slow
def test_a_checkpoint_that_is_no_critic_of_this_model(tiny, tmp_path):
    from tests.assets import make_checkpoint

    make_checkpoint(tmp_path / "other", layers=1)
    more = [*PPO, "--critic-load", str(tmp_path / "other")]
    done = run(grpo_arguments(tiny, tmp_path / "run", *more))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "CheckpointError" in done.stderr and "weights are missing" in done.stderr, done.stderr[-2000:]
    assert str(tmp_path / "other") in done.stderr

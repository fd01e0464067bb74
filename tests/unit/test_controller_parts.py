"""Small parts of the controller: metrics of a round, resume checks, data sources in the seeds' style."""

import argparse
import json
from pathlib import Path

import pytest

from instep.arguments.args import Args
from instep.controller.round_metrics import (
    evaluation_metrics,
    evaluation_summary,
    metrics_of_rollout,
    speed_metrics,
    training_metrics,
    wandb_settings,
)
from instep.controller.run_state import changed_arguments, restore_source, source_state, start_rollout_id
from instep.data.ledger import Ledger
from instep.errors import ConfigError, RolloutError
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample


def test_training_metrics_of_several_steps():
    steps = [
        {"loss": 1.0, "lr": 0.1, "skipped_steps": 0.0, "log_prob_gap_mean": 0.01, "log_prob_gap_max": 0.5},
        {"loss": 3.0, "lr": 0.2, "skipped_steps": 1.0, "log_prob_gap_mean": 0.9, "log_prob_gap_max": 9.0},
    ]
    out = training_metrics(steps)
    assert out["train/loss"] == 2.0 and out["train/lr"] == 0.2 and out["train/skipped_steps"] == 1.0
    # the second step has moved away from the policy that sampled: its difference is no gap of the engine
    assert out["train/log_prob_gap_mean"] == 0.01 and out["train/log_prob_gap_max"] == 0.5


def test_a_metric_that_some_steps_lack_is_the_mean_of_the_others():
    out = training_metrics([{"lr": 1.0, "skipped_steps": 0.0}, {"lr": 1.0, "skipped_steps": 0.0, "kl_loss": 4.0}])
    assert out["train/kl_loss"] == 4.0


def test_evaluation_metrics_also_without_samples():
    samples = [Sample(response_length=4), Sample(response_length=8)]
    data = {
        "a": {"rewards": [1.0, 0.0], "truncated": [True, False], "samples": samples},
        "b": {"rewards": [0.25], "truncated": [], "samples": []},
    }
    out = evaluation_metrics(RolloutFnEvalOutput(data, {"mine": 7.0}))
    assert out["eval/a/reward_mean"] == 0.5 and out["eval/a/truncated_ratio"] == 0.5
    assert out["eval/a/response_length_mean"] == 6.0 and out["eval/b/reward_mean"] == 0.25 and out["mine"] == 7.0
    assert "eval/b/response_length_mean" not in out


def own_log(rollout_id, args, samples, metrics, seconds):
    return (rollout_id, [s.index for s in samples], metrics, seconds) == (args.expected, [4, 5], {"mine": 7.0}, 2.5)


def test_a_log_function_of_the_user_may_take_the_place_of_the_metrics():
    group = [Sample(index=i, reward=float(i), response_length=i) for i in (4, 5)]
    output = RolloutFnTrainOutput([group], {"mine": 7.0})
    settings = {
        "reward_key": None,
        "command": "train",
        "advantage_estimator": "grpo",
        "custom_rm_path": None,
        "log_passrate": True,
        "expected": 3,
    }
    plain = argparse.Namespace(custom_rollout_log_function_path=None, **settings)
    args = argparse.Namespace(custom_rollout_log_function_path=f"{__name__}.own_log", **settings)
    expected = metrics_of_rollout(plain, 3, output, 2.5)
    assert expected["rollout/reward_mean"] == 4.5 and expected["mine"] == 7.0 and expected["rollout/pass@1"] == 1.0
    assert metrics_of_rollout(args, 3, output, 2.5) == {}
    assert metrics_of_rollout(args, 9, output, 2.5) == expected  # it said no
    plain.command = "sft"
    of_sft = metrics_of_rollout(plain, 3, output, 2.5)
    assert "rollout/response_length_mean" in of_sft and not any("reward" in n or "pass@" in n for n in of_sft)


def test_the_first_rollout_of_a_session():
    def first(given=None, checkpoint=None, state=None, finetune=False):
        return start_rollout_id(argparse.Namespace(start_rollout_id=given, finetune=finetune), checkpoint, state)

    saved = (Path("iter_0000007"), 7)
    assert first() == 0 and first(checkpoint=saved) == 8 and first(checkpoint=saved, finetune=True) == 0
    assert first(checkpoint=saved, state={"rollout_id": 5}) == 6
    assert first(given=2, checkpoint=saved, state={"rollout_id": 5}) == 2


def test_wandb_key_and_host_go_through_the_environment(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    names = ("project", "group", "mode", "team", "dir", "run_id")
    args = argparse.Namespace(
        use_wandb=True, wandb_host=None, wandb_key="s3cret", **{f"wandb_{n}": None for n in names}
    )
    settings = wandb_settings(args, "run-7")
    assert settings is not None and settings["run_id"] == "run-7" and "s3cret" not in str(settings)
    import os

    assert os.environ["WANDB_API_KEY"] == "s3cret" and "WANDB_BASE_URL" not in os.environ
    assert wandb_settings(argparse.Namespace(use_wandb=False), None) is None


def arguments(**values):
    return Args(**{"command": "train", "rollout_seed": 42, "deterministic_mode": False, **values})


def test_a_resume_with_other_data_is_refused():
    now = arguments()
    before = {**now.to_dict(), "rollout_seed": 1}
    with pytest.raises(ConfigError, match="--rollout-seed was 1 and is 42") as caught:
        changed_arguments(before, now)
    assert "--finetune" in str(caught.value)


def test_a_resume_shows_what_changed():
    now = arguments(lr=0.5, save="elsewhere", betas=(0.9, 0.98))
    assert changed_arguments(json.loads(json.dumps({**now.to_dict(), "save": "here"})), now) == []
    now = arguments(lr=0.5)
    assert changed_arguments({**now.to_dict(), "lr": 0.1}, now) == ["--lr was 0.1 and is 0.5"]


def test_a_deterministic_run_keeps_what_gives_the_order_of_sums():
    """Threads and micro-batches share out sums: another number gives other bits."""
    now = arguments(num_threads=2)
    assert changed_arguments({**now.to_dict(), "num_threads": 4}, now) == ["--num-threads was 4 and is 2"]
    now = arguments(num_threads=2, deterministic_mode=True)
    with pytest.raises(ConfigError, match="--num-threads was 4 and is 2"):
        changed_arguments({**now.to_dict(), "num_threads": 4}, now)
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu was 512"):
        changed_arguments({**now.to_dict(), "max_tokens_per_gpu": 512}, now)


def test_a_data_source_in_the_seeds_style_keeps_its_own_state():
    class Source:
        calls: list = []

        def save(self, rollout_id):
            self.calls.append(("save", rollout_id))

        def load(self, rollout_id):
            self.calls.append(("load", rollout_id))

    source = Source()
    assert source_state(source, 3) is None
    restore_source(source, None, 3)
    assert source.calls == [("save", 3), ("load", 3)]


def test_groups_that_a_rollout_function_made_are_taken_in_once():
    ledger, made = Ledger(), [[Sample(group_index=100)], [Sample(group_index=101)]]
    ledger.adopt(made)
    ledger.consume(made)
    ledger.check()
    assert (ledger.num_issued, ledger.num_consumed) == (2, 2)
    ledger.adopt(made)  # a second time they are known, and closed
    with pytest.raises(RolloutError, match="cannot be consumed"):
        ledger.consume(made)


def test_a_step_lasts_as_long_as_its_phases_without_the_evaluation():
    out = speed_metrics({"rollout": 2.0, "train": 3.0, "eval": 5.0}, 10, 30)
    assert out["perf/step_seconds"] == 5.0 and out["perf/eval_seconds"] == 5.0
    assert out["perf/rollout_tokens_per_second"] == 5.0 and out["perf/train_tokens_per_second"] == 10.0


def test_the_summary_names_evaluations_of_the_two_ends_only():
    rows = [{"rollout_id": i, "eval/a/reward_mean": i / 10} for i in (0, 2, 4)]
    assert evaluation_summary(rows, 4) == {"eval_reward_before": 0.0, "eval_reward_after": 0.4, "evaluations": rows}
    assert evaluation_summary(rows, 5) == {"eval_reward_before": 0.0, "evaluations": rows}
    assert evaluation_summary(rows[1:], 4) == {"eval_reward_after": 0.4, "evaluations": rows[1:]}

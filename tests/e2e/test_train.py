"""`instep train` and `instep sft` as a user runs them: real engine, real workers, real files."""

import json
import math
import os
import shutil

import pytest
import torch

from instep.observability.report import make_report
from instep.system.scratch import Scratch
from tests.documented import undocumented, unlisted
from tests.e2e.commands import grpo_arguments, run

KEY = "0123456789abcdef0123456789abcdef01234567"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """One run on one rank of the hf backend, with evaluation and checkpoints."""
    run_dir = tmp_path_factory.mktemp("run")
    more = ["--eval-prompt-data", "held-out", str(tiny / "eval.jsonl"), "--eval-interval", "2", "--use-tensorboard"]
    more += ["--save", str(run_dir / "ckpt"), "--save-interval", "1", "--save-hf", str(run_dir / "hf")]
    more += [
        "--global-batch-size",
        "8",
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.01",
        "--kl-loss-type",
        "k3",
        "--entropy-coef",
        "0.001",
    ]
    more += ["--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g"]
    more += ["--wandb-key", KEY, "--rm-url", f"http://me:{KEY}@127.0.0.1:9/reward?api_key={KEY}"]
    killed = [Scratch("instep-golden-", run_dir), Scratch(".instep-export-", run_dir)]  # of a sync, and of an export
    for scratch in killed:
        os.close(scratch._fd)  # as the end of its process does
    done = run(grpo_arguments(tiny, run_dir, *more))
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


def test_the_run_writes_what_the_readme_promises(finished):
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("eval_reward_before", "eval_reward_after", "wall_seconds", "peak_pss_bytes", "num_steps", "versions"):
        assert name in summary
    assert summary["num_steps"] == 4 and summary["sync_probe_max_abs_diff"] <= 1e-5
    for name in ("metrics.jsonl", "samples.jsonl", "report.html", "hf/model.safetensors", "hf/tokenizer.json"):
        assert (finished / name).stat().st_size > 0
    assert "data:image/svg" not in (finished / "report.html").read_text()  # forked, see tests/no_plots.py
    assert list((finished / "tensorboard").iterdir())
    assert (finished / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.slow  # `tests/unit/test_report.py` draws the same plots of made rows
def test_the_report_has_all_plots(finished, tmp_path):
    again = shutil.copytree(finished, tmp_path / "again")
    assert make_report(again).read_text().count("data:image/svg") == 9


def test_metrics_are_complete_and_consistent(finished):
    steps = [r for r in rows(finished / "metrics.jsonl") if "train/loss" in r]
    assert [r["step"] for r in steps] == [0, 1]
    names = "rollout/reward_mean rollout/response_length_mean rollout/truncated_ratio train/entropy train/pg_clipfrac "
    names += "train/kl_loss train/log_prob_gap_mean train/log_prob_gap_max train/engine_kl train/grad_norm "
    names += "perf/rollout_seconds perf/train_seconds perf/sync_seconds perf/rollout_tokens_per_second "
    names += "perf/train_tokens_per_second perf/pss_bytes sync/version sync/probe_max_abs_diff"
    for row in steps:
        for name in names.split():
            assert name in row and math.isfinite(row[name]), name
        assert 0 < row["perf/reward_seconds"] < row["perf/rollout_seconds"]
        assert 0 < row["perf/log_probs_seconds"] < row["perf/train_seconds"]
        assert row["train/log_prob_gap_max"] < 1e-4  # fp32: trainer and engine compute the same policy
        assert 0 < row["train/entropy"] < math.log(60)
    assert undocumented({name for row in rows(finished / "metrics.jsonl") for name in row}) == set()
    assert [r["sync/version"] for r in steps] == [2, 3]  # one session before the first rollout
    assert all(r["train/kl_loss"] > 1e-4 for r in steps)  # two updates a rollout: the second is off the reference


def test_wandb_is_written_offline_and_the_key_nowhere(finished):
    assert list((finished / "wandb").glob("offline-run-*/run-*.wandb"))
    files = [p for p in finished.rglob("*") if p.is_file()]
    assert len(files) > 10
    assert [p for p in files if KEY.encode() in p.read_bytes()] == []


def test_all_files_are_in_the_document(finished):
    files = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    for folder, flag in (("ckpt/", "--save"), ("hf/", "--save-hf")):
        inside = {name for name in files if name.startswith(folder)}
        assert len(inside) > 3 and unlisted({name.removeprefix(folder) for name in inside}, flag) == set()
        files -= inside
    assert unlisted(files, "--run-dir") == set()


def test_what_a_killed_run_has_left_is_removed(finished):
    assert [p for p in finished.iterdir() if p.name.startswith(("instep-", ".hf"))] == []


def test_what_the_run_writes_is_its_users_alone(finished):
    """But for the exported model, which is handed out and holds neither prompts nor settings."""
    mine = [p for p in finished.rglob("*") if p.relative_to(finished).parts[0] != "hf"]
    assert {"config.json", "samples.jsonl", "run_state.json", "engine-0.log"} <= {p.name for p in mine}
    assert [p for p in mine if p.stat().st_mode & 0o077 and not p.is_symlink()] == []
    mask = os.umask(0o077)
    os.umask(mask)
    assert (finished / "hf").stat().st_mode & 0o777 == 0o777 & ~mask
    assert {p.stat().st_mode & 0o777 for p in (finished / "hf").iterdir()} == {0o666 & ~mask}
    config = json.loads((finished / "config.json").read_text())
    assert config["args"]["rm_url"] == "http://***@127.0.0.1:9/reward?api_key=***"


def test_every_token_carries_the_version_that_made_it(finished):
    samples = [r for r in rows(finished / "samples.jsonl") if r["split"] == "train"]
    assert {v for r in samples if r["rollout_id"] == 0 for v in r["weight_versions"]} == {"1"}
    assert {v for r in samples if r["rollout_id"] == 1 for v in r["weight_versions"]} == {"2"}


def test_the_exported_checkpoint_is_the_trained_policy(finished, tiny):
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tiny / "hf").state_dict()
    after = AutoModelForCausalLM.from_pretrained(finished / "hf").state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[k], after[k]) for k in before if "norm" not in k)
    assert all(torch.allclose(before[k], after[k], atol=0.02) for k in before)


@pytest.mark.slow
def test_num_rollout_0_evaluates_whatever_the_interval_is(finished, tiny, tmp_path):
    """The checkpoint covers 2 rollouts, which are no multiple of 3. Two sets are evaluated, each in its own way."""
    held_out = {"name": "held-out", "path": str(tiny / "eval.jsonl")}
    drawn = {
        "name": "drawn",
        "path": f"{tiny / 'eval.jsonl'}@[0:4]",
        "n_samples_per_eval_prompt": 4,
        "rm_type": "random",
    }
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [held_out, drawn]}}))
    more = ["--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "3", "--log-passrate"]
    more += ["--skip-eval-before-train", "--load", str(finished / "ckpt"), "--global-batch-size", "8"]
    done = run(grpo_arguments(tiny, tmp_path / "run", *more, "--num-rollout", "0"))
    assert done.returncode == 0, done.stderr[-3000:]
    before, summary = (json.loads((d / "summary.json").read_text()) for d in (finished, tmp_path / "run"))
    assert summary["evaluations"][-1]["rollout_id"] == 2 and summary["num_rollouts"] == 0
    [row] = [r for r in rows(tmp_path / "run/metrics.jsonl") if "eval/held-out/reward_mean" in r]
    rates = [row[f"eval/drawn/pass@{k}"] for k in (1, 2, 4)]
    assert rates[0] == row["eval/drawn/reward_mean"] and rates == sorted(rates) and "eval/held-out/pass@1" not in row
    assert summary["eval_reward_after"] == row["eval/held-out/reward_mean"] and row["step"] == 2
    assert len(summary["evaluations"]) == len(before["evaluations"])  # the save came before the last of these


@pytest.mark.slow  # `test_killed_at_random_and_resumed_is_bit_identical` asserts more
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_a_stopped_run_goes_on_where_it_was(tiny, tmp_path, backend):
    """3 rollouts at once, and 2 and then 1 more with the same command: the same weights and counters."""
    common = ["--train-backend", backend, "--save-interval", "1", "--global-batch-size", "16", "--lr", "1e-3"]
    whole = tmp_path / "whole"
    done = run(grpo_arguments(tiny, whole, *common, "--num-rollout", "3", "--save-hf", str(whole / "hf")))
    assert done.returncode == 0, done.stderr[-3000:]
    parts = tmp_path / "parts"
    ckpt = ["--save", str(parts / "ckpt"), "--load", str(parts / "ckpt"), "--save-hf", str(parts / "hf")]
    for num_rollout in ("2", "3"):
        done = run(grpo_arguments(tiny, parts, *common, *ckpt, "--num-rollout", num_rollout))
        assert done.returncode == 0, done.stderr[-3000:]
    steps = [r for r in rows(parts / "metrics.jsonl") if "train/loss" in r]
    expected = [r for r in rows(whole / "metrics.jsonl") if "train/loss" in r]
    assert [r["step"] for r in steps] == [0, 1, 2]
    for got, want in zip(steps, expected, strict=True):
        assert got["rollout/reward_mean"] == want["rollout/reward_mean"]
        assert got["rollout/response_length_mean"] == want["rollout/response_length_mean"]
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-4)
        assert got["sync/version"] == want["sync/version"]  # the weights of a checkpoint keep the number of theirs
    from safetensors.torch import load_file

    ours, theirs = (load_file(d / "hf" / "model.safetensors") for d in (parts, whole))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_sft_learns_and_exports(tiny, tmp_path):
    arguments = ["sft", "--hf-checkpoint", str(tiny / "hf"), "--prompt-data", str(tiny / "sft.jsonl")]
    arguments += ["--input-key", "messages", "--rollout-batch-size", "32", "--global-batch-size", "16"]
    arguments += ["--num-rollout", "6", "--lr", "6e-3", "--lr-decay-style", "constant", "--train-backend", "hf"]
    arguments += ["--actor-num-gpus-per-node", "1", "--num-threads", "1", "--micro-batch-size", "16"]
    arguments += ["--run-dir", str(tmp_path / "sft"), "--save-hf", str(tmp_path / "hf"), "--device", "cpu"]
    done = run(arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [r["train/loss"] for r in rows(tmp_path / "sft" / "metrics.jsonl") if "train/loss" in r]
    assert len(losses) == 6 and losses[-1] < 0.6 * losses[0]
    assert (tmp_path / "hf" / "model.safetensors").exists()

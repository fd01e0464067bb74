"""A run that is killed and started again ends as if nothing had happened."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

from tests.e2e.commands import grpo_arguments, run
from tests.e2e.killing import Run, metrics, schedule

SEED = 20261121
STEPS = "--save-interval 2 --global-batch-size 8 --eval-interval 4 --n-samples-per-eval-prompt 1".split()
REWARD = ["--custom-rm-path", "tests.e2e.observed.reward", "--rm-type", "math"]
EXACT = ["--deterministic-mode", "--use-kl-loss", "--kl-loss-coef", "0.01", "--ref-update-interval", "3"]
# Rollouts that take more groups than they train on, give some back, and continue what an abort left.
LOOSE = "--over-sampling-batch-size 6 --partial-rollout --dynamic-sampling-filter-path tests.e2e.observed.two_of_three"


def arguments(tiny, run_dir, backend, num_rollout, *more):
    held_out = ["--eval-prompt-data", "held-out", str(tiny / "eval.jsonl")]
    common = ["--train-backend", backend, "--num-rollout", str(num_rollout), "--num-logged-samples", "1000"]
    common += ["--vllm-max-num-seqs", "32", "--rollout-max-response-len", "24", "--save-hf", str(run_dir / "hf")]
    return grpo_arguments(tiny, run_dir, *common, *held_out, *STEPS, *REWARD, *more)


def tensors(path):
    with safe_open(path / "hf" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def state(victim, num_rollout):
    return json.loads((victim.run_dir / "ckpt" / f"iter_{num_rollout - 1:07d}" / "run_state.json").read_text())


def samples(run_dir):
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "version" not in k} for row in rows]


def exit_codes(run):
    """How many sessions ended otherwise than by themselves, and the last one's exit code."""
    *killed, last = [session.exit_code for session in run.sessions]
    return sum(code != 0 for code in killed), last


def kill_and_compare(tiny, root, backend, kills, *more, plan=None):
    rng = random.Random(SEED + kills)
    num_rollout = 2 * kills + (4 if plan else 2)
    whole = Run(arguments(tiny, root / "whole", backend, num_rollout, *EXACT, *more), root / "whole")
    assert whole.finish().exit_code == 0, whole.sessions[0].stderr[-3000:]
    expected = metrics(whole.run_dir)
    assert sorted(expected) == list(range(num_rollout))

    victim = Run(arguments(tiny, root / "killed", backend, num_rollout, *EXACT, *more), root / "killed")
    for phase, way in plan or schedule(rng, kills):
        session = victim.kill(rng, phase, way)
        assert session.exit_code != 0, session
        steps = sorted(session.metrics)
        assert steps[:2] == [session.start, session.start + 1], session
        for step in steps:  # also those that the next session will do again
            assert session.metrics[step] == expected[step], (session.killed, step)
    last = victim.finish()
    assert last.exit_code == 0, last.stderr[-3000:]

    assert metrics(victim.run_dir) == expected
    assert samples(victim.run_dir) == samples(whole.run_dir)
    ours, theirs = tensors(victim.run_dir), tensors(whole.run_dir)
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not ours[n].equal(theirs[n])] == []
    before, after = state(whole, num_rollout), state(victim, num_rollout)
    written = [json.loads(p.read_text()) for p in victim.run_dir.glob("ckpt/iter_*/run_state.json")]
    assert len(written) > 1 and {one["started"] for one in written} == {after["started"]}  # what templates call today
    assert after["ledger"] == before["ledger"] and after["data_source"] == before["data_source"]
    assert after["ledger"]["num_consumed"] == 4 * num_rollout
    keys = [k for k in before["evaluations"][0] if "reward" in k or k == "rollout_id"]
    assert [[e[k] for k in keys] for e in after["evaluations"]] == [[e[k] for k in keys] for e in before["evaluations"]]
    return victim


@pytest.mark.parametrize("backend", ["hf", pytest.param("megatron", marks=pytest.mark.slow)])
def test_killed_at_random_and_resumed_is_bit_identical(tiny, tmp_path, backend):
    assert exit_codes(kill_and_compare(tiny, tmp_path, backend, 1, "--micro-batch-size", "4")) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_killed_fifty_times_is_bit_identical(tiny, tmp_path, backend):
    assert exit_codes(kill_and_compare(tiny, tmp_path, backend, kills=50)) == (50, 0)


PPO = "--advantage-estimator ppo --critic-lr 2e-3 --num-critic-only-steps 1 --lambd 0.9".split()
PPO += "--kl-loss-coef 0 --kl-coef 0.05 --value-clip 0.01".split()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_ppo_killed_and_resumed_is_bit_identical(tiny, tmp_path, backend):
    """The critic dies while both train, then all of the run while both save."""
    plan = [("train", "critic"), ("save", "tree")]
    victim = kill_and_compare(tiny, tmp_path, backend, 2, *PPO, plan=plan)
    assert "critic rank 0 died (SIGKILL)" in victim.sessions[0].stderr
    rows = metrics(victim.run_dir)
    assert rows[7]["critic/values_mean"] != 0 and all(rows[step]["critic/value_clipfrac"] > 0 for step in range(7))


LORA = "--lora-rank 4 --weight-sync lora --lr 1e-2".split()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_a_lora_run_that_is_killed_and_resumed_is_bit_identical(tiny, tmp_path, backend):
    """The adapter, and the reference that was the policy of an earlier step, come back; no checkpoint holds a base."""
    victim = kill_and_compare(tiny, tmp_path, backend, 1, *LORA, plan=[("sync", "worker")])
    assert exit_codes(victim) == (1, 0)
    for folder in sorted((victim.run_dir / "ckpt").glob("iter_*")):
        held = FileSystemReader(folder).read_metadata().state_dict_metadata
        assert held and all(".lora_" in name for name in held)
        assert (folder / "lora.json").exists()
    assert {p.name for p in (folder / "reference").glob("*.*")} >= {"adapter_model.safetensors", "adapter_config.json"}
    begun, merged = tensors(tiny), tensors(victim.run_dir)
    assert begun.keys() == merged.keys() and 0 < sum(not begun[n].equal(merged[n]) for n in begun) == 14


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_killed_and_resumed_on_a_gpu_is_bit_identical(tiny, tmp_path, backend):
    on_gpu = ["--device", "cuda", "--rollout-backend", "embedded"]
    assert exit_codes(kill_and_compare(tiny, tmp_path, backend, 3, *on_gpu)) == (3, 0)


def kill_and_count(tiny, root, kills, command="train", plan=None):
    """Over-sampling, partial rollouts and a filter: every group that was ever issued has exactly one fate."""
    rng = random.Random(SEED - kills)
    num_rollout = 2 * kills + 2
    words = arguments(tiny, root / "run", "hf", num_rollout, *LOOSE.split())
    victim = Run([command, *words[1:]], root / "run")
    for phase, way in plan or schedule(rng, kills):
        assert victim.kill(rng, phase, way).exit_code != 0
    last = victim.finish()
    assert last.exit_code == 0, last.stderr[-3000:]
    rows = [row for row in samples(victim.run_dir) if row["split"] == "train"]
    by_step: dict = {}
    for row in rows:
        by_step.setdefault(row["rollout_id"], []).append(row["group_index"])
    assert sorted(by_step) == list(range(num_rollout))
    trained = [g for groups in by_step.values() for g in sorted(set(groups))]
    assert len(trained) == len(set(trained)) == 4 * num_rollout  # none is missing, none came twice
    ledger, source = state(victim, num_rollout)["ledger"], state(victim, num_rollout)["data_source"]
    buffered = [group[0]["group_index"] for group in source["buffer"]]
    assert sorted(buffered) == sorted(int(g) for g, fate in ledger["open"].items() if fate == "buffered")
    assert not set(buffered) & set(trained)
    assert ledger["num_consumed"] == len(trained)
    assert ledger["num_issued"] == len(trained) + sum(ledger["dropped"].values()) + len(ledger["open"])
    assert ledger["num_issued"] == source["next_group"]
    assert ledger["dropped"], "the filter left nothing out: this tests less than it says"
    return victim


@pytest.mark.slow  # the tests above show it of runs that must end in the same bits
def test_killed_at_random_nothing_is_lost_or_trained_twice(tiny, tmp_path):
    assert exit_codes(kill_and_count(tiny, tmp_path, kills=3)) == (3, 0)


@pytest.mark.slow
def test_killed_fifty_times_nothing_is_lost_or_trained_twice(tiny, tmp_path):
    assert exit_codes(kill_and_count(tiny, tmp_path, kills=50)) == (50, 0)


LAYOUTS = {
    "hf": ["--actor-num-gpus-per-node", "2"],
    "megatron": ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_another_layout_resumes_with_equal_parameters(tiny, tmp_path, backend):
    """One rank saves; two go on, at learning rate 0: what they export is what the one had."""
    ckpt = ["--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt"), "--lr-decay-style", "constant"]
    first = arguments(tiny, tmp_path / "first", backend, 1, *ckpt)
    done = run(first)
    assert done.returncode == 0, done.stderr[-3000:]
    other = [*LAYOUTS[backend], *ckpt, "--lr", "0"]
    done = run(arguments(tiny, tmp_path / "other", backend, 2, *other))
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = tensors(tmp_path / "first"), tensors(tmp_path / "other")
    assert [name for name in before if not before[name].equal(after[name])] == []
    assert "changed since the checkpoint: --lr was 0.001 and is 0.0" in done.stdout
    assert "changed since the checkpoint: --actor-num-gpus-per-node was 1 and is 2" in done.stdout

    done = run([*first, "--rollout-seed", "7"])
    assert done.returncode == 2 and "--rollout-seed was 42 and is 7" in done.stderr and "--finetune" in done.stderr

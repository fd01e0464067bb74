"""`instep dpo` as a user runs it: it learns to prefer, also pairs that it has not seen, and goes on where it was."""

import json

import pytest
import torch
from safetensors.torch import load_file

from instep.cli import main
from tests.assets import make_pairs
from tests.e2e.commands import run


@pytest.fixture(scope="module")
def pairs(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    make_pairs(root / "train.jsonl", 64)
    make_pairs(root / "held_out.jsonl", 48, seed=1)
    return root


def arguments(tiny, data, run_dir, *more):
    line = f"dpo --hf-checkpoint {tiny / 'hf'} --prompt-data {data} --rollout-batch-size 16 --micro-batch-size 4 "
    line += f"--global-batch-size 8 --lr 1e-3 --lr-decay-style constant --rollout-shuffle --run-dir {run_dir} "
    line += "--actor-num-gpus-per-node 1 --num-threads 1 --device cpu --deterministic-mode"
    return [*line.split(), *more]


def rows(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


# That megatron takes the same steps is shown by tests/distributed/test_dpo.py.
@pytest.mark.parametrize("backend", ["hf", pytest.param("megatron", marks=pytest.mark.slow)])
def test_it_learns_to_prefer(tiny, pairs, tmp_path, backend):
    more = ["--train-backend", backend, "--num-rollout", "6", "--save-hf", str(tmp_path / "hf")]
    done = run(arguments(tiny, pairs / "train.jsonl", tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr[-3000:]
    steps = rows(tmp_path / "run")
    assert len(steps) == 6 and not any("reward" in name for name in steps[0] if name.startswith("rollout/"))
    assert steps[0]["train/loss"] > 0.5 > steps[-1]["train/loss"]
    assert steps[-1]["train/reward_margin"] > 0.5 and steps[-1]["train/reward_accuracy"] > 0.9
    margin = steps[-1]["train/chosen_reward"] - steps[-1]["train/rejected_reward"]
    assert steps[-1]["train/reward_margin"] == pytest.approx(margin, rel=1e-5)
    # Held-out pairs: what was trained against where it began, scored by a run that changes nothing.
    more = ["--train-backend", backend, "--num-rollout", "3", "--load", str(tmp_path / "hf"), "--lr", "0"]
    done = run(arguments(tiny, pairs / "held_out.jsonl", tmp_path / "scored", *more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert min(row["train/reward_accuracy"] for row in rows(tmp_path / "scored")) > 0.8


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tiny, pairs, tmp_path):
    def save(name):
        return ["--train-backend", "hf", "--save", str(tmp_path / name), "--load", str(tmp_path / name)]

    data = pairs / "train.jsonl"
    for name, num_rollout in (("whole", "5"), ("parts", "2"), ("parts", "5")):
        more = [*save(f"{name}-ckpt"), "--num-rollout", num_rollout, "--save-hf", str(tmp_path / f"{name}-hf")]
        done = run(arguments(tiny, data, tmp_path / name, *more))
        assert done.returncode == 0, done.stderr[-3000:]
    names = "train/loss train/reward_margin train/grad_norm train/chosen_reward rollout/response_length_mean".split()
    whole, parts = (
        [[row[n] for n in ["step", *names]] for row in rows(tmp_path / name)] for name in ("whole", "parts")
    )
    assert whole == parts and len(whole) == 5
    ours, theirs = (load_file(tmp_path / f"{name}-hf" / "model.safetensors") for name in ("parts", "whole"))
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def test_bad_pairs_end_the_run_before_it_begins(tiny, pairs, tmp_path, capsys):
    lines = (pairs / "train.jsonl").read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    for row, expected in (
        ({"prompt": "1+1=", "chosen": "2"}, "the row has no 'rejected'"),
        ({"prompt": "1+1=", "chosen": "", "rejected": "3"}, "'chosen' is empty"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "both responses are equal"),
    ):
        bad.write_text("\n".join([*lines[:6], json.dumps(row), *lines[6:]]) + "\n")
        assert main(arguments(tiny, bad, tmp_path / "run", "--num-rollout", "1")) == 2
        error = capsys.readouterr().err
        assert f"DataError: {expected}" in error and f"{bad}, line 7" in error and "remedy" in error
    assert not (tmp_path / "run").exists()

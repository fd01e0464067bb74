"""Whole runs with `--weight-sync single-copy`: the same numbers as by `shm`, resumed or not, and faults by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from instep.scratch import memory_root
from tests.e2e.commands import grpo_arguments, run

STEPS = ["--rm-type", "random", "--num-steps-per-rollout", "2", "--deterministic-mode", "--rollout-backend", "embedded"]
REFERENCE = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--ref-update-interval", "1"]


def outcome(tiny: Path, folder: Path, *more: str) -> tuple[dict[int, dict], dict]:
    """The metrics of each step and the weights that are exported after the last."""
    flags = [*STEPS, *REFERENCE, "--num-rollout", "3", "--save-hf", str(folder / "hf-{rollout_id}"), *more]
    done = run(grpo_arguments(tiny, folder / "run", *flags))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "train/loss" in row}, load_file(folder / "hf-2" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_the_same_as_by_shared_memory(tiny: Path, tmp_path: Path, precision: str) -> None:
    """Two optimizer steps a rollout, a reference that is refreshed, exports; and again, resumed after two rollouts."""
    by_shm = outcome(tiny, tmp_path / "shm", "--weight-sync", "shm", "--precision", precision)
    one = ["--weight-sync", "single-copy", "--precision", precision]
    by_one = outcome(tiny, tmp_path / "one", *one)
    kept = ["--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt")]
    outcome_of_two = grpo_arguments(tiny, tmp_path / "two" / "run", *STEPS, *REFERENCE, *one, *kept)
    assert run(outcome_of_two).returncode == 0
    resumed = outcome(tiny, tmp_path / "two", *one, *kept)
    for rows, weights in (by_one, resumed):
        for step, row in rows.items():
            for name in ("train/loss", "train/grad_norm"):
                assert row[name] == by_shm[0][step][name], (step, name)
            assert row["sync/bytes"] == 0 < by_shm[0][step]["sync/bytes"] and row["train/grad_norm"] > 0
        assert weights.keys() == by_shm[1].keys()
        assert all(weights[name].equal(by_shm[1][name]) for name in weights)
    assert not [path for path in memory_root().glob("instep-sync-*/memory-*") if path.stat().st_uid == os.geteuid()]


@pytest.mark.parametrize(
    "flags,what",
    [
        (["--rollout-num-gpus", "2"], "2 engines or replicas are planned"),
        (["--rollout-external-engine-addrs", "127.0.0.1:1"], "an engine that this run starts on its own host"),
        (["--device", "cuda"], "shares weights on a CPU only today"),
    ],
)
def test_what_cannot_share_is_refused_before_anything_starts(tiny: Path, tmp_path: Path, flags, what) -> None:
    done = run(grpo_arguments(tiny, tmp_path, "--rollout-backend", "embedded", "--weight-sync", "single-copy", *flags))
    assert done.returncode == 2 and what in done.stderr and "--weight-sync shm" in done.stderr, done.stderr


def test_an_engine_in_another_dtype_is_named_with_its_tensor(tiny: Path, tmp_path: Path) -> None:
    flags = ["--rollout-backend", "embedded", "--weight-sync", "single-copy", "--vllm-dtype", "bfloat16"]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--precision", "fp32"))
    assert done.returncode == 1 and "SyncError" in done.stderr, done.stderr
    assert "model.embed_tokens.weight is float32 in the trainer and bfloat16 in the engine" in done.stderr

"""Whole runs with `--weight-sync single-copy`: the same numbers as by `shm`, resumed or not, and faults by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.system.scratch import memory_root
from instep.weights.bridge import NAME
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, run
from tests.e2e.test_lease import Controller, within
from tests.e2e.test_single_copy import TOKENS
from tests.keys import key_file

STEPS = ["--rm-type", "random", "--num-steps-per-rollout", "2", "--deterministic-mode", "--rollout-backend", "embedded"]
REFERENCE = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--ref-update-interval", "1"]


def outcome(tiny: Path, folder: Path, *more: str) -> tuple[dict[int, dict], dict]:
    """The metrics of each step and the weights that are exported after the last."""
    flags = [*STEPS, *REFERENCE, "--num-rollout", "3", "--save-hf", str(folder / "hf-{rollout_id}"), *more]
    done = run(grpo_arguments(tiny, folder / "run", *flags))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "train/loss" in row}, load_file(folder / "hf-2" / "model.safetensors")


def memories() -> set[Path]:
    """What engines of runs of this user have made; tests without a run have folders of other names."""
    found = memory_root().glob("instep-sync-*/memory-*")
    return {path for path in found if "-test-" not in path.parent.name and path.stat().st_uid == os.geteuid()}


@pytest.mark.slow
@pytest.mark.alone  # runs of other tests have their memory in the same place
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_the_same_as_by_shared_memory(tiny: Path, tmp_path: Path, precision: str) -> None:
    """Two optimizer steps a rollout, a reference that is refreshed, exports; and again, resumed after two rollouts."""
    before = memories()
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
    assert not memories() - before


@pytest.mark.parametrize(
    "flags,what",
    [
        (["--device", "cuda"], "shares weights with an embedded engine only on a CPU"),
    ],
)
def test_what_cannot_share_is_refused_before_anything_starts(tiny: Path, tmp_path: Path, flags, what) -> None:
    done = run(grpo_arguments(tiny, tmp_path, "--rollout-backend", "embedded", "--weight-sync", "single-copy", *flags))
    assert done.returncode == 2 and what in done.stderr and "--weight-sync shm" in done.stderr, done.stderr


@pytest.mark.slow
def test_an_engine_in_another_dtype_is_named_with_its_tensor(tiny: Path, tmp_path: Path) -> None:
    flags = ["--rollout-backend", "embedded", "--weight-sync", "single-copy", "--vllm-dtype", "bfloat16"]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--precision", "fp32"))
    assert done.returncode == 1 and "SyncError" in done.stderr, done.stderr
    assert "model.embed_tokens.weight is float32 in the trainer and bfloat16 in engine 0" in done.stderr


def test_two_engines_follow_one_trainer(tiny: Path, tmp_path: Path) -> None:
    """The parameters of its two ranks are views of the first one's weights; a session writes into the second one, too.

    In bf16 the first probe differs by more than the tolerance, and the golden twin shows that it is rounding.
    """
    flags = ["--rollout-backend", "embedded", "--rollout-num-gpus", "2", "--weight-sync", "single-copy"]
    flags += ["--actor-num-gpus-per-node", "2"]
    done = run(grpo_arguments(tiny, tmp_path / "run", *flags, "--precision", "bf16", "--rm-type", "random"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    synced = [row for row in rows if "sync/version" in row]
    assert len(synced) >= 2 and all(row["sync/bytes"] == 0 for row in synced)
    assert max(row["sync/probe_max_abs_diff"] for row in synced) <= 0.05


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_that_a_user_has_started_shares_its_weights(tmp_path: Path, monkeypatch, num_workers: int) -> None:
    """The run finds it by its file, sends nothing, and leaves it with its last weights. It ends with a trainer that was
    killed at a step; the file that a killed server leaves is named."""
    checkpoint = make_checkpoint(tmp_path / "hf", head_dim=32)
    make_prompts(tmp_path / "train.jsonl", 16)
    flags = ["--rollout-backend", "vllm", "--vllm-kv-cache-memory-bytes", str(128 << 20), "--weight-sync"]
    flags += ["single-copy", "--precision", "fp32", "--rm-type", "random"]
    size = ["--rollout-num-gpus", str(num_workers), "--rollout-num-gpus-per-engine", str(num_workers)]
    args = parse(grpo_arguments(tmp_path, tmp_path / "run", *flags, *size)[1:], "train")
    logs = tmp_path / "theirs"
    logs.mkdir()
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=logs, env={"LOGDIR": str(logs)})
    monkeypatch.setitem(ENVIRONMENT, "LOGDIR", str(logs))
    address = ["--rollout-external-engine-addrs", engine.url.removeprefix("http://"), *key_file(tmp_path)]
    command = grpo_arguments(tmp_path, tmp_path / "run", *flags, *address, "--save-hf", str(tmp_path / "last"))
    try:
        engine.wait_ready(240)
        bridge = json.loads((logs / NAME).read_text())
        assert (bridge["model"], bridge["tp_degree"], bridge["single_copy_enabled"]) == (
            str(checkpoint),
            num_workers,
            True,
        )
        assert (logs / NAME).stat().st_mode & 0o777 == 0o600 and bridge["num_params"] == len(bridge["param_names"])
        shared = Path(bridge["instep"]["folder"])
        done = run(command)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        synced = [row for row in rows if "sync/version" in row]
        assert len(synced) >= 2 and all(row["sync/bytes"] == 0 for row in synced)
        assert max(row["sync/probe_max_abs_diff"] for row in synced) <= 1e-4
        scores = torch.tensor(engine.prompt_log_probs(TOKENS, timeout=60))
        assert torch.isfinite(scores).all() and len(list(shared.glob("memory-*.json"))) == num_workers
        assert (tmp_path / "last").exists()
        left, trainer = (logs / NAME).read_bytes(), Controller(engine, folder=str(shared))
        trainer.end()
        assert within(120.0, lambda: engine.process is not None and not engine.process.alive())
        assert "the engine ends, its weights may be of two" in (logs / "engine-0.log").read_text()
        (logs / NAME).touch(0o600)  # it removes its own, unless vLLM ends its worker first (after 5 s)
        (logs / NAME).write_bytes(left)
        killed = run(command)
        assert killed.returncode == 2 and f"{NAME}" in killed.stderr and "it is stale" in killed.stderr, killed.stderr
    finally:
        engine.stop()

"""A kind of engine that no file of instep knows: a run chooses it, starts it, syncs weights to it and proves them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.commands import ENVIRONMENT, grpo_arguments
from tests.forks import OF_A_RUN, OfTests, cold, using

THIRD = [sys.executable, "-m", "tests.engines.third_kind"]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*THIRD, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_a_run_with_a_kind_that_nobody_knows(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    """It has no route of any other kind, so whoever went past the kind would get a 404."""
    words = grpo_arguments(tmp_path, tmp_path / "run", "--hf-checkpoint", str(tiny_model), "--prompt-data", str(data))
    # Flags know the kinds that are there when they are imported.
    with contextlib.closing(OfTests(["tests.engines.third_registered", *OF_A_RUN])) as server, using(server):
        done = run([*words, "--rollout-backend", "third", "--num-rollout", "2", "--heartbeat-timeout", "30"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 2 and max(row["train/log_prob_gap_max"] for row in steps) < 1e-4
    assert steps[-1]["sync/version"] >= 2 and steps[-1]["sync/probe_max_abs_diff"] <= 1e-4
    assert "engine 0 of the third kind" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()


def test_flags_and_help_know_it() -> None:
    words = ["plan", "--rollout-backend", "third", "--rollout-num-gpus-per-engine", "2", "--vllm-block-size", "16"]
    with cold():
        assert "auto|embedded|vllm|sglang|third" in run(["train", "--help"]).stdout
        refused = run(words)
    assert refused.returncode == 2 and "--vllm-block-size" in refused.stderr

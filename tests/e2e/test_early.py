"""The trainer scores finished groups of a real rollout while others are generated, begins its step with them, and dies
at it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.role import RoleTrainer
from instep.errors import WorkerError
from instep.rollout.vllm_rollout import generate as generate_response
from instep.train_sync import train
from instep.types import Sample
from tests.bounds import allowed
from tests.e2e.commands import children, gone_within, grpo_arguments

FLAGS = "--rollout-backend embedded --rollout-num-gpus 1 --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k2 "
FLAGS += "--custom-generate-function-path tests.e2e.test_early.generate --num-rollout 2 --micro-batch-size 1"
TWO_STEPS = ("--num-steps-per-rollout", "2")
LATE = 0.7  # seconds, of one group in four
pytestmark = pytest.mark.usefixtures("no_plots")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(LATE * ((sample.group_index or 0) % 4 == 2))
    return await generate_response(args, sample, sampling_params)


def run(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    train(parse(grpo_arguments(tiny, folder, *FLAGS.split(), *more)[1:], "train"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_the_columns_are_those_of_one_call(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, begin, names = RoleTrainer.score, RoleTrainer.train, ["ref_log_probs", "log_probs"]
    sizes, apart = list[int](), list[bool]()

    def noting(self: RoleTrainer, batch: Any, schedule: Any, names: list[str]) -> Any:
        sizes.append(batch.num_samples)
        return score(self, batch, schedule, names)

    def comparing(self: RoleTrainer, batch: Any, schedule: Any, *more: Any) -> Any:
        at_once = replace(batch, token_columns={"loss_mask": batch.token_columns["loss_mask"]})
        score(self, at_once, schedule, names)()
        for name in names:  # with a sample in each micro-batch these have the same bits
            assert torch.equal(batch.token_columns[name], at_once.token_columns[name]), name
        apart.append(not torch.allclose(*(at_once.token_columns[name] for name in names), atol=1e-4))
        return begin(self, batch, schedule, *more)

    monkeypatch.setattr(RoleTrainer, "score", noting)
    monkeypatch.setattr(RoleTrainer, "train", comparing)
    rows = run(tiny, tmp_path, *TWO_STEPS)
    assert sum(sizes) == 2 * 16 and len(sizes) >= 4, "each sample once, and the last group by itself"
    assert all(0 < row["perf/early_log_probs_seconds"] < row["perf/rollout_seconds"] for row in rows)
    assert apart == [False, True], "the policy moves away from the reference"


def test_the_step_is_begun_with_groups_that_are_finished(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, train_, begun, rest = RoleTrainer.begin_step, RoleTrainer.train, [], []

    def beginning(self: RoleTrainer, batch: Any, schedule: Any, token: str) -> Any:
        begun.append((token, batch.num_samples))
        return begin(self, batch, schedule, token)

    def training(self: RoleTrainer, batch: Any, *words: Any, **more: Any) -> Any:
        rest.append((batch.num_samples, more.get("scale")))
        return train_(self, batch, *words, **more)

    monkeypatch.setattr(RoleTrainer, "begin_step", beginning)
    monkeypatch.setattr(RoleTrainer, "train", training)
    rows = run(tiny, tmp_path, "--on-gap", "stop", "--rm-type", "random")
    early = [sum(n for name, n in begun if name == token) for token in dict.fromkeys(name for name, _ in begun)]
    assert len(early) == 2 and all(n >= 4 for n in early) and rest == [(16 - n, 1 / 16) for n in early]
    for row in rows:
        assert 0 < row["perf/early_train_seconds"] < row["perf/rollout_seconds"]
        assert row["train/loss_weight"] == pytest.approx(1) and row["train/log_prob_gap_coverage"] == pytest.approx(1)
        assert row["train/grad_norm"] > 0 and 0 < row["train/log_prob_gap_fresh"] < 1e-3
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples and all(sample["tokens"]["log_probs"] for sample in samples)


@pytest.mark.parametrize(
    ("call", "flags"), [pytest.param("score", TWO_STEPS, marks=pytest.mark.slow), ("begin_step", ())]
)
def test_a_trainer_that_is_killed_at_it_ends_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, flags: tuple[str, ...]
) -> None:
    real, killed, ours = getattr(RoleTrainer, call), [], []

    def killing(self: RoleTrainer, *words: Any) -> Any:
        ours.extend(children(os.getpid()))
        killed.append(time.monotonic())
        os.kill(self.workers.processes[0].pid, signal.SIGSTOP)  # so that it is at work when it dies
        finish = real(self, *words)
        os.kill(self.workers.processes[0].pid, signal.SIGKILL)
        return finish

    monkeypatch.setattr(RoleTrainer, call, killing)
    during = {"score": "log_probs"}.get(call, call)
    with pytest.raises(WorkerError, match=rf"actor rank 0 died \(SIGKILL\), during '{during}'"):
        run(tiny, tmp_path, *flags)
    assert len(killed) == 1 and time.monotonic() - killed[0] < allowed(10)
    assert gone_within(ours, 5) and not (tmp_path / "metrics.jsonl").read_text()

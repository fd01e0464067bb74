"""`instep.train` and `instep.Run`: what the command line does, in a script or a notebook."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import instep
from instep.system.private import UMASK_VARIABLE
from tests.command_line import keywords
from tests.e2e.commands import gone_within, grpo_arguments, run, sft_arguments
from tests.e2e.killing import metrics
from tests.e2e.test_train import rows

pytestmark = pytest.mark.usefixtures("no_plots")


def settings(tiny: Path, folder: Path, *more: str) -> list[str]:
    common = ["--save", str(folder / "ckpt"), "--save-interval", "1", "--save-hf", str(folder / "hf")]
    return grpo_arguments(tiny, folder, *common, "--global-batch-size", "8", *more)


def as_keywords(words: list[str]) -> dict[str, Any]:
    """The keywords of `instep.Run` for a command line; the prompts are a list, the reward has a function."""
    flags = keywords(words[1:])
    prompts = [json.loads(line) for line in Path(flags.pop("prompt_data")).read_text().splitlines()]
    del flags["rm_type"]

    async def short(args: Any, sample: Any) -> float:  # which no module has
        return -sample.response_length / 16

    return {"model": flags.pop("hf_checkpoint"), "prompts": prompts, "reward": short, **flags}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_a_loop_that_is_left_by_an_error_is_closed_and_goes_on(tiny: Path, tmp_path: Path, capfd: Any) -> None:
    flags = as_keywords(settings(tiny, tmp_path))
    seen, ours, before = [], set[psutil.Process](), children()
    with pytest.raises(ZeroDivisionError):
        for step in instep.Run(**flags):
            seen.append(step)
            ours = {one for one in children() - before if "fork" not in one.name()}  # whose server stays
            raise ZeroDivisionError
    assert len(ours) >= 2 and gone_within(list(ours), 10)  # engine and trainer
    [row] = [r for r in rows(tmp_path / "metrics.jsonl") if "train/loss" in r]
    assert seen[0].rollout_id == 0 and [len(group) for group in seen[0].samples] == [4] * 4
    assert seen[0].metrics == {name: row[name] for name in seen[0].metrics}
    mean = sum(-s.response_length / 16 for group in seen[0].samples for s in group) / 16
    assert row["rollout/reward_mean"] == pytest.approx(mean)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "left" and "goes on from it" in summary["to_go_on"]
    assert "the loop was left, 1 of 2 rollouts done" in (told := capfd.readouterr().err) and "interrupted" not in told
    assert not (tmp_path / "logs/error.txt").exists()

    summary = instep.train(**flags, load=tmp_path / "ckpt")
    assert summary["num_rollouts"] == 1 and summary["num_steps"] == 4
    assert [r["step"] for r in rows(tmp_path / "metrics.jsonl") if "train/loss" in r] == [0, 1]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary and summary["status"] == "finished"
    assert summary["model"] == str(tmp_path / "hf") and (tmp_path / "hf/config.json").exists()
    assert (
        not [one for one in children() - before if "fork" not in one.name()]
        and len(list(tmp_path.glob("prompts-*.jsonl"))) == 1
    )


def both_in_turns(runs: list[instep.Run]) -> None:
    for _ in zip(*runs, strict=True):
        pass


def both_in_threads(runs: list[instep.Run]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(list, runs))


def of_process() -> tuple[Any, ...]:
    """What runs change in the process that they work in."""
    os.umask(mask := os.umask(0))
    handlers = [signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)]
    threads = torch.get_num_threads(), gc.get_threshold()
    return mask, os.environ.get(UMASK_VARIABLE), sys.stdout, sys.stderr, os._exit, *handlers, *threads


@pytest.mark.parametrize("together", [both_in_turns, pytest.param(both_in_threads, marks=pytest.mark.slow)])
def test_two_runs_at_a_time_compute_what_each_computes_alone(
    tiny: Path, tmp_path: Path, together: Callable[[list[instep.Run]], None]
) -> None:
    """They have their own functions, keys, loops, gates and engines."""

    def run_of(folder: str, number: int) -> instep.Run:
        words = ["--rollout-max-response-len", str(8 * number), "--seed", str(number), "--deterministic-mode"]
        evaluates = {"eval_interval": 1, "eval_prompt_data": {"held-out": tiny / "eval.jsonl"}} if number == 2 else {}
        flags = evaluates | as_keywords(grpo_arguments(tiny, tmp_path / f"{folder}-{number}", *words))

        def score(args: Any, sample: Any) -> float:
            return float(number * len(set(sample.tokens)))

        return instep.Run(**flags | {"reward": score, "command": ["train", "train-async"][number - 1]})

    def evaluations(folder: Path) -> list[dict[str, float]]:
        found = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in rows(folder / "metrics.jsonl")]
        return [row for row in found if row]

    for number in (1, 2):
        assert len(list(run_of("alone", number))) == 2
    before = of_process()
    together([run_of("both", number) for number in (1, 2)])
    assert of_process() == before
    for number in (1, 2):
        alone, beside = tmp_path / f"alone-{number}", tmp_path / f"both-{number}"
        assert metrics(beside) == metrics(alone) and sorted(metrics(alone)) == [0, 1]
        assert evaluations(beside) == evaluations(alone) and len(evaluations(alone)) == 3 * (number == 2)


@pytest.mark.slow
def test_the_loops_of_other_commands(tiny: Path, tmp_path: Path) -> None:
    before = children()
    flags = as_keywords(grpo_arguments(tiny, tmp_path / "ahead", "--num-rollout", "3", "--max-staleness", "1"))
    loop = instep.Run(command="train-async", **flags)
    steps = list(loop)
    assert [step.rollout_id for step in steps] == [0, 1, 2] and loop.summary["num_rollouts"] == 3
    assert all("async/staleness_max" in step.metrics and len(step.samples) == 4 for step in steps)
    assert {r["step"] for r in rows(tmp_path / "ahead/metrics.jsonl") if "async/staleness_max" in r} == {0, 1, 2}
    sft = keywords(sft_arguments(tiny, tmp_path / "sft", "--num-rollout", "2")[1:])
    for step in instep.Run(command="sft", **sft):
        assert step.evaluation == {} and step.metrics["train/loss"] > 0
        break
    assert children() <= before  # of engines that were at work, too


@pytest.mark.slow
def test_the_loop_trains_what_the_command_line_trains(tiny: Path, tmp_path: Path) -> None:
    done = run(settings(tiny, tmp_path / "command", "--num-rollout", "3"))
    assert done.returncode == 0, done.stderr[-3000:]
    flags = as_keywords(settings(tiny, tmp_path / "loop", "--num-rollout", "3"))
    del flags["reward"]
    for step in instep.Run(**flags, rm_type="math"):
        if step.rollout_id == 1:
            break
    assert instep.train(**flags, reward="math", load=tmp_path / "loop/ckpt")["num_rollouts"] == 1
    folders = tmp_path / "command", tmp_path / "loop"
    one, other = (load_file(folder / "hf/model.safetensors") for folder in folders)
    assert one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)
    losses = [[r["train/loss"] for r in rows(d / "metrics.jsonl") if "train/loss" in r] for d in folders]
    assert len(losses[0]) == 3 and losses[0] == losses[1]

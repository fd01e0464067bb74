"""Phases of a run: their seconds, and what is shown of them while they overlap."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from instep.observability.run_logger import RunLogger


def run(folder: Path) -> RunLogger:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    return RunLogger(folder, {}, title="a run", num_steps=4, use_tensorboard=False, console=console)


def test_phases_of_two_threads_overlap(tmp_path: Path) -> None:
    """A rollout runs ahead in a thread of its own while the one before is trained on."""
    began, trained = threading.Event(), threading.Event()
    ahead = []

    def rollout() -> None:
        with log.phase("rollout", 4) as phase:
            began.set()
            assert trained.wait(10)
            time.sleep(0.05)
        ahead.append(phase)

    with run(tmp_path) as log:
        thread = threading.Thread(target=rollout)
        with log.phase("train", 3) as train:
            thread.start()
            assert began.wait(10)
            time.sleep(0.05)
            now = [part.split(", for ") for part in log.where().split("; ")]
            assert [name for name, _ in now] == ["train 3", "rollout 4"]
            assert all(seconds.endswith(" s") for _, seconds in now)
            assert log.progress.phase == "train 3 + rollout 4"
        assert log.progress.phase == "rollout 4" and log.where().startswith("rollout 4, for ")
        of_training = train.seconds
        trained.set()
        thread.join(10)
        assert log.where() == f"rollout 4, for {ahead[0].seconds:.1f} s"  # none goes on: the one that ended last
    assert train.seconds == of_training >= 0.05
    assert ahead[0].seconds >= 0.1 and ahead[0].ended > train.ended > ahead[0].began > train.began
    assert log.take_seconds("train", "rollout") == {"train": train.seconds, "rollout": ahead[0].seconds}


def test_seconds_are_taken_once(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        with log.phase("sync") as first:
            time.sleep(0.02)
            assert log.take_seconds("sync") == {} and first.seconds >= 0.02  # it has not ended
        with log.phase("sync") as second:
            pass
        with pytest.raises(ZeroDivisionError), log.phase("eval") as failed:
            time.sleep(0.02)
            _ = 1 / 0
        assert log.take_seconds("sync", "save") == {"sync": first.seconds + second.seconds}
        assert log.take_seconds("sync", "eval") == {"eval": failed.seconds} and failed.seconds >= 0.02


def test_an_error_names_the_phase_that_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not one that goes on in another thread, or that is ended because of it."""
    with pytest.raises(ValueError, match="broken"), run(tmp_path) as log:
        ahead = log.phase("rollout", 1)
        ahead.__enter__()
        with log.phase("train", 0):
            raise ValueError("broken")
    assert "stopped in phase train 0, 0 of 4 rollouts done: ValueError" in capsys.readouterr().err

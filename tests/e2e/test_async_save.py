"""Runs with --async-save: what is on the disk when, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from instep.arguments.parse import parse
from instep.checkpoints.folders import latest_iteration
from instep.checkpoints.integrity import check_whole
from instep.rollout.request_gate import gate
from instep.train_sync import train
from tests.e2e import commands
from tests.e2e.commands import grpo_arguments, run, sft_arguments, start
from tests.e2e.killing import metrics
from tests.e2e.test_endings import wait_for

# In a worker: from the second one on, the writing of a checkpoint waits while the file `hold` is there.
SLOW_DISK = """
import os, sys, time
if "instep.cluster.worker_main" in sys.orig_argv:
    from instep.training.saving import _Snapshot
    write, calls = _Snapshot.write, []
    def slow(self):
        calls.append(self)
        while len(calls) > 1 and os.path.exists("FOLDER/hold"):
            time.sleep(0.01)
        if len(calls) > 1 and os.path.exists("FOLDER/full"):
            raise OSError(28, "No space left on device")
        return write(self)
    _Snapshot.write = slow
"""
STEPS = ["--num-rollout", "6", "--save-interval", "2", "--deterministic-mode"]


@pytest.fixture
def disk(tmp_path, monkeypatch, no_plots) -> Iterator[Path]:
    """The folder of the files `hold` and `full`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_DISK.replace("FOLDER", str(folder)))
    path = os.pathsep.join(filter(None, [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    monkeypatch.setitem(commands.ENVIRONMENT, "PYTHONPATH", path)
    yield folder
    (folder / "hold").unlink(missing_ok=True)


def sft(tiny: Path, folder: Path, *more: str) -> list[str]:
    return sft_arguments(tiny, folder, *STEPS, "--load", str(folder / "ckpt"), *more)


def digests(folder: Path, iteration: int) -> dict[str, Any]:
    check_whole(folder / "ckpt" / f"iter_{iteration:07d}")
    files = json.loads((folder / "ckpt" / f"iter_{iteration:07d}" / "files.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith((".distcp", ".pt"))}


def held(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until the save of iteration 3 is held, and training has gone on until the next save."""

    def stands() -> bool:
        return (folder / "metrics.jsonl").exists() and 5 in metrics(folder)

    wait_for(stands, 120, process)
    assert latest_iteration(folder / "ckpt") == 1
    assert sorted(p.name for p in (folder / "ckpt").glob("*iter_*")) == [".iter_0000003.partial", "iter_0000001"]


def ended(process: subprocess.Popen[str], by: Callable[[], Any]) -> tuple[str, str]:
    try:
        by()
        return process.communicate(timeout=240)
    finally:
        process.kill()


def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(tiny, tmp_path, disk):
    """It has trained until the end before it is killed: what it does again must have the same bits."""
    (disk / "hold").touch()
    process = start(sft(tiny, tmp_path, "--async-save"))
    tree = psutil.Process(process.pid)

    def kill() -> None:
        held(process, tmp_path)
        for victim in [tree, *tree.children(recursive=True)]:
            victim.kill()

    ended(process, kill)
    first = metrics(tmp_path)
    assert sorted(first) == list(range(6)) and latest_iteration(tmp_path / "ckpt") == 1 and digests(tmp_path, 1)
    (disk / "hold").unlink()
    words = sft(tiny, tmp_path, "--async-save")
    train(parse(words[1:], words[0]))
    assert gate().guards("http://127.0.0.1:1")  # as in a new process, for whatever comes next in this one
    assert metrics(tmp_path) == first and first[5]["train/loss"] != first[1]["train/loss"]
    assert latest_iteration(tmp_path / "ckpt") == 5 and digests(tmp_path, 3) and digests(tmp_path, 5)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [[row[name] for row in rows if name in row] for name in ("perf/save_seconds", "perf/save_write_seconds")]
    assert len(seconds[0]) == 3 and len(seconds[1]) in (2, 3)  # that of 1 may have stood in a row that the killed made
    assert min(map(min, seconds)) > 0


@pytest.mark.slow
def test_a_run_that_is_interrupted_waits_for_its_checkpoint(tiny, tmp_path, disk):
    (disk / "hold").touch()
    process = start(sft(tiny, tmp_path, "--async-save"))

    def interrupt() -> None:
        held(process, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert any("waiting until the checkpoint of iteration 3 is on the disk" in line for line in process.stdout)
        (disk / "hold").unlink()

    stderr = ended(process, interrupt)[1]
    iteration = tmp_path / "ckpt" / "iter_0000003"
    assert f"interrupted, 6 of 6 rollouts done; the last checkpoint is {iteration}" in stderr
    assert process.returncode == 130 and digests(tmp_path, 3) and latest_iteration(tmp_path / "ckpt") == 3


@pytest.mark.slow
def test_a_second_interrupt_gives_the_checkpoint_up(tiny, tmp_path, disk):
    (disk / "hold").touch()
    process = start(sft(tiny, tmp_path, "--async-save"))

    def interrupt() -> None:
        held(process, tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert any("waiting until the checkpoint of iteration 3 is on the disk" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)

    stderr = ended(process, interrupt)[1]
    assert f"the last checkpoint is {tmp_path / 'ckpt' / 'iter_0000001'}" in stderr and process.returncode == 130
    assert [p.name for p in (tmp_path / "ckpt").glob("*iter_*")] == ["iter_0000001"]


@pytest.mark.slow
def test_an_error_of_the_writer_ends_the_run_by_name(tiny, tmp_path, disk):
    (disk / "full").touch()
    done = run(sft(tiny, tmp_path, "--async-save"))
    assert done.returncode == 1
    assert "CheckpointError: the checkpoint of iteration 3 could not be written" in done.stderr
    assert "rank 0 reports: OSError: [Errno 28] No space left on device" in done.stderr
    assert "iteration 1 is complete" in done.stderr
    assert [p.name for p in (tmp_path / "ckpt").glob("*iter_*")] == ["iter_0000001"]


PPO = "--advantage-estimator ppo --kl-loss-coef 0 --num-rollout 4 --save-interval 1 --deterministic-mode".split()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_actor_and_critic_that_park_write_what_they_would_have_written(tiny, tmp_path, backend):
    """With a critic, its own folder, a refreshed reference, turns on one device, and another rank of each."""
    more = ["--train-backend", backend, "--colocate", "--offload", "--rollout-backend", "embedded", *PPO]
    more += ["--use-kl-loss", "--ref-update-interval", "2", "--actor-num-gpus-per-node", "2"]
    found = []
    for flags in ([], ["--async-save"]):
        folder = tmp_path / f"{len(flags)}"
        saves = ["--save", str(folder / "ckpt"), "--critic-save", str(folder / "critic")]
        done = run(grpo_arguments(tiny, folder, *more, *saves, *flags))
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([digests(folder, i) for i in range(4)])
        critic = folder / "critic" / "iter_0000003"
        check_whole(critic)
        assert {"critic/__0_0.distcp", "critic/__1_0.distcp"} <= found[-1][3].keys()
        assert os.path.samefile(
            critic / "critic" / "__0_0.distcp", folder / "ckpt" / "iter_0000003/critic/__0_0.distcp"
        )
    assert found[0] == found[1]

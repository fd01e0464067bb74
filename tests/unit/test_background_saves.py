"""The save in flight of a run: who waits for it, how long, and whose error it is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.checkpoints.folders import find_checkpoint, read_state
from instep.checkpoints.integrity import TRACKER, check_whole
from instep.cluster.local import WorkerGroup
from instep.controller.run_state import Beginning
from instep.controller.saves import Saves
from instep.controller.trainer import Trainer
from instep.errors import CheckpointError, WorkerError
from tests.bounds import allowed
from tests.command_line import argv, make_folder, refusal
from tests.forks import cold

BEGINNING = Beginning(None, None, [], 0, "run")

# A rank that computes nothing. In the second save rank 1 dies: before it has answered, or with --async-save afterwards.
RANK = """
import os, pickle, signal, sys, time
from multiprocessing.connection import Connection
from types import SimpleNamespace
connection, rank, num_saves = Connection(int(os.environ["INSTEP_WORKER_FD"])), 0, 0
while True:
    method, args = pickle.loads(connection.recv_bytes())
    result = {"setup": SimpleNamespace(dp_rank=0, dp_size=1), "remark": "", "save": {}}.get(method)
    rank = args[0] if method == "setup" else rank
    num_saves += method == "save"
    dies = rank == 1 and num_saves == 2
    if method == "save":
        (args[0] / f"__{rank}_0.distcp").write_bytes(bytes(9))
        if dies and sys.argv[1] != "--async-save":
            os.kill(os.getpid(), signal.SIGKILL)
        if not dies:
            (args[0] / f".written_{rank}.json").write_text('{"digests": {}}')
    connection.send_bytes(pickle.dumps(("result", result)))
    if dies:
        deadline = time.monotonic() + 60
        while not os.path.exists("dies") and time.monotonic() < deadline:  # when the controller has both answers
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Writer:
    """A trainer whose save ends when `gate` is open, and then as `result` says."""

    def __init__(self, result: Exception | None = None):
        self.gate, self.result, self.states = threading.Event(), result, []

    def begin_save(self, root: Path, iteration: int, state: Any, earlier: Any, ended: Any) -> Callable[[], Path]:
        self.states.append((iteration, state, earlier is None))

        def end() -> Path:
            while not self.gate.wait(0.01):
                if ended.is_set():
                    raise CheckpointError("the run has ended", where="here", remedy="none")
            if self.result is not None:
                raise self.result
            return root

        return end


def saves(tmp_path: Path, *, dead: bool = False, timeout: float = 60.0, **more: Any) -> tuple[Saves, list[str]]:
    def check_alive() -> None:
        if dead:
            raise WorkerError("actor rank 0 died (SIGKILL)", where="its log", remedy="look")

    args: Any = SimpleNamespace(
        save=str(tmp_path), critic_save=None, save_hf=None, train_timeout=timeout, async_save=True, **more
    )
    told: list[str] = []
    deployment: Any = SimpleNamespace(worker_groups=[SimpleNamespace(check_alive=check_alive)])
    return Saves(args, BEGINNING, deployment, told.append), told


def write(made: Saves, writer: Any, iteration: int = 3) -> None:
    made.write(writer, iteration, lambda: {"rollout_id": iteration})


def test_a_save_returns_before_it_is_written_and_the_next_waits(tmp_path):
    made, told = saves(tmp_path)
    writer = Writer()
    write(made, writer)
    made.check()
    assert made.metrics() == {} and writer.states == [(3, {"rollout_id": 3}, False)]
    began = time.monotonic()
    threading.Timer(0.3, writer.gate.set).start()
    made.wait()
    assert time.monotonic() - began > 0.2
    (name, seconds), *none = made.metrics().items()
    assert name == "perf/save_write_seconds" and 0.2 < seconds < 60 and not none
    assert made.metrics() == {}
    write(made, writer, 4)
    assert writer.states[1] == (4, {"rollout_id": 4}, True)  # the earlier run's ones were moved by the first
    made.last()
    made.close()
    assert not told


@pytest.mark.parametrize("ask", ["check", "wait"])
def test_an_error_of_the_writer_is_raised_once(tmp_path, ask):
    made, told = saves(tmp_path)
    writer = Writer(CheckpointError("no space", where="here", remedy="make room"))
    writer.gate.set()
    write(made, writer)
    assert wait([made._in_flight], 60).done
    with pytest.raises(CheckpointError, match="no space"):
        getattr(made, ask)()
    made.last()
    assert not told  # it was the error of the run


def test_waiting_has_a_bound_and_watches_the_workers(tmp_path):
    made, told = saves(tmp_path, timeout=0.2)
    write(made, Writer())
    with pytest.raises(CheckpointError, match="the checkpoint of iteration 3 is not on the disk after 0 s") as error:
        made.wait()
    assert error.value.where == "--async-save" and "--train-timeout" in error.value.remedy
    made.last()
    made.close()
    assert told[-1] == "the checkpoint that was being written is lost: the run has ended"
    made, told = saves(tmp_path, dead=True)
    write(made, Writer())
    with pytest.raises(WorkerError):
        made.wait()
    made.last()
    assert told[0].startswith("waiting until the checkpoint of iteration 3 is on the disk; press Ctrl-C again")
    made.close()
    assert told[1] == "the checkpoint that was being written is lost: actor rank 0 died (SIGKILL)"
    assert made._in_flight.done()


@pytest.mark.parametrize("flag", ["", "--async-save"])
def test_a_rank_that_dies_in_a_save_is_named_and_the_checkpoint_before_stays(tmp_path, monkeypatch, flag):
    make_folder(tmp_path, monkeypatch)
    args, told = parse(argv(f"--save ckpt --save-interval 1 {flag}")), []
    popen = subprocess.Popen
    with cold(), monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", lambda argv, **more: popen([sys.executable, "-c", RANK, flag], **more))
        workers = WorkerGroup("actor", 2, tmp_path)
    cluster: Any = SimpleNamespace(
        workers=workers, critic=SimpleNamespace(num_ranks=0), setup_requests={"actor": [(0,), (1,)]}
    )
    deployment: Any = SimpleNamespace(worker_groups=[workers])
    began = time.monotonic()
    try:
        trainer = Trainer(args, cluster, BEGINNING, num_rollout=3, scratch=tmp_path / "scratch", tell=told.append)
        made = Saves(args, BEGINNING, deployment, told.append)
        state = {"num_steps": 4, "version": 5, "ledger": {}, "evaluations": [], "args": {}}
        made.write(trainer, 1, lambda: {**state, "rollout_id": 1})
        made.wait()
        with pytest.raises(WorkerError) as error:
            made.write(trainer, 2, lambda: {**state, "rollout_id": 2})
            Path("dies").touch()
            made.wait()
        assert error.value.what.startswith("actor rank 1 died (SIGKILL)") and str(tmp_path) in error.value.where
        assert "run again to resume from the last checkpoint" in error.value.remedy
        made.last()
    finally:
        workers.close()
    made.close()
    lost = "the checkpoint that was being written is lost: actor rank 1 died (SIGKILL)"
    assert told[-1:] == ([lost] if flag else []) and time.monotonic() - began < allowed(60)
    folder, iteration = find_checkpoint(Path("ckpt"), None)
    check_whole(folder)
    assert iteration == 1 and read_state(folder)["rollout_id"] == 1 and len(list(folder.glob("*.distcp"))) == 2
    assert sorted(path.name for path in Path("ckpt").iterdir()) == ["iter_0000001", TRACKER]


def test_what_is_whole_in_the_end_is_not_called_lost(tmp_path):
    """Workers may die when all have written, and the controller only names what is there."""
    made, told = saves(tmp_path, dead=True)
    writer = Writer()
    write(made, writer)
    made.last()
    writer.gate.set()
    assert wait([made._in_flight], 60).done
    made.close()
    assert len(told) == 1 and told[0].startswith("waiting until")


def test_an_error_of_no_kind_is_named_and_keeps_no_process_from_being_ended(tmp_path, caplog):
    made, told = saves(tmp_path)
    writer = Writer(RuntimeError("can't start new thread"))
    writer.gate.set()
    write(made, writer)
    made.last()
    made.close()
    why = "the checkpoint of iteration 3 was not written: RuntimeError: can't start new thread"
    assert told[-1] == f"the checkpoint that was being written is lost: {why}"
    assert "Traceback" in caplog.text and "in end" in caplog.text


def test_the_format_torch_has_no_place_for_spread_experts(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    what = refusal("--save out --ckpt-format torch --expert-model-parallel-size 2")
    assert "experts are split in another way with --expert-model-parallel-size" in what and "save as torch_dist" in what


def test_the_flag_needs_a_checkpoint(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    what = refusal("--async-save --save-hf out")
    assert "there is no checkpoint to write" in what and "give --save" in what

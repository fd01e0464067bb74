"""Calls to a rank that is lost in the middle of a message, which no test of whole messages sees."""

import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe

import pytest
import torch

from instep.cluster import local
from instep.errors import WorkerError
from instep.system import kernel
from tests.bounds import allowed
from tests.forks import cold

# Answers the first call; of its answer to the second one it sends the length and a part, and then signals itself.
RANK = """
import os, pickle, struct, sys
from instep.cluster.local import WorkerChannel
from instep.system.processes import follow_parent
follow_parent()
channel = WorkerChannel()
channel.receive()
channel.result("whole")
channel.receive()
os.write(channel._connection.fileno(), struct.pack("!i", 1_000_000) + b"x" * 1000)
os.kill(os.getpid(), int(sys.argv[1]))
"""


class Counted:
    num_pickled = 0

    def __reduce__(self):
        Counted.num_pickled += 1
        return Counted, ()


def test_ranks_of_one_share_get_the_same_bytes(tmp_path):
    pairs = [Pipe() for _ in range(3)]
    workers = local.WorkerGroup("actor", 0, tmp_path)
    workers._connections = [ours for ours, _ in pairs]
    shares = [(Counted(), 0), (Counted(), 1)]
    workers.start("train", timeout=60, per_rank=[shares[0], shares[1], shares[0]])
    received = [pickle.loads(theirs.recv_bytes()) for _, theirs in pairs]
    assert [(method, own[1]) for method, own in received] == [("train", 0), ("train", 1), ("train", 0)]
    assert Counted.num_pickled == 2


def group(tmp_path, monkeypatch, number):
    real = subprocess.Popen

    def start(argv, **kwargs):
        return real([sys.executable, "-c", RANK, str(int(number))], **kwargs)

    with cold():
        monkeypatch.setattr("subprocess.Popen", start)
        workers = local.WorkerGroup("actor", 1, tmp_path)
        monkeypatch.undo()
    return workers


def test_tensors_of_a_message_arrive_as_they_are():
    """Those that numpy has no type for, too; a part of a tensor comes without the rest."""
    flat = torch.arange(1000.0)
    tensors = [flat[3:7], flat.view(10, 100).T, torch.tensor([True, False]), torch.ones(2, dtype=torch.bfloat16)]
    tensors += [torch.tensor(3), torch.zeros(0, dtype=torch.int64), torch.ones(2, requires_grad=True)]
    got = pickle.loads(local.pickled(("train", {"tensors": tensors})))[1]["tensors"]
    for one, other in zip(got, tensors, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.requires_grad == other.requires_grad
    got[0].add_(1)  # it is writable
    assert len(local.pickled(flat[3:7])) < 400


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "died (SIGKILL)"), (signal.SIGSTOP, "is stopped")])
def test_a_rank_that_is_lost_in_the_middle_of_a_message_is_named(tmp_path, monkeypatch, number, words):
    workers = group(tmp_path, monkeypatch, number)
    monkeypatch.setattr(kernel, "STOPPED_SECONDS", 0.5)
    try:
        assert workers.call("first", timeout=60) == ["whole"]
        began = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            workers.call("second", timeout=60)
        assert caught.value.what == f"actor rank 0 {words}, during 'second'"
        assert time.monotonic() - began < allowed(20)
    finally:
        workers.close()


def test_the_deadline_of_a_call_holds_in_the_middle_of_a_message(tmp_path, monkeypatch):
    workers = group(tmp_path, monkeypatch, signal.SIGSTOP)
    monkeypatch.setattr(kernel, "STOPPED_SECONDS", 1000.0)  # so that nothing else ends the wait
    try:
        assert workers.call("first", timeout=60) == ["whole"]
        began = time.monotonic()
        with pytest.raises(WorkerError, match="did not answer 'second' within 1 s"):
            workers.call("second", timeout=1.0)
        assert time.monotonic() - began < allowed(20)
    finally:
        workers.close()

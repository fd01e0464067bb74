"""Calls to a rank that is lost in the middle of a message, which no test of whole messages sees."""

import signal
import subprocess
import sys
import time

import pytest

from instep import kernel
from instep.cluster import local
from instep.errors import WorkerError

# Answers the first call; of its answer to the second one it sends the length and a part, and then signals itself.
RANK = """
import os, pickle, struct, sys
from instep.cluster.local import WorkerChannel
from instep.processes import follow_parent
follow_parent()
channel = WorkerChannel()
channel.receive()
channel.result("whole")
channel.receive()
os.write(channel._connection.fileno(), struct.pack("!i", 1_000_000) + b"x" * 1000)
os.kill(os.getpid(), int(sys.argv[1]))
"""


def group(tmp_path, monkeypatch, number):
    real = subprocess.Popen

    def start(argv, **kwargs):
        return real([sys.executable, "-c", RANK, str(int(number))], **kwargs)

    monkeypatch.setattr("instep.processes.subprocess.Popen", start)
    workers = local.WorkerGroup("actor", 1, tmp_path)
    monkeypatch.undo()
    return workers


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
        assert time.monotonic() - began < 20
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
        assert time.monotonic() - began < 20
    finally:
        workers.close()

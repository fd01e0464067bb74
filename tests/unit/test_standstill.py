"""A process under this one that stands stopped is told of by name, once, and again when it goes on."""

import os
import signal
import subprocess
import time

from instep import kernel
from instep.controller import watch
from instep.processes import SupervisedProcess


def lines_of(seconds, processes, *disturbed):
    """What the watch tells in so many seconds, while the signals are sent one after the other."""
    told = []
    with watch.StandstillWatch(lambda: processes, told.append):
        for pid, number in disturbed:
            os.kill(pid, number)
            time.sleep(seconds / 2)
    return told


def test_a_stopped_process_is_told_by_name_and_pid(tmp_path, monkeypatch):
    for name, value in (("STOPPED_SECONDS", 0.4), ("FAMILY_SECONDS", 0.2)):
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    engine = SupervisedProcess("engine 3", ["sleep", "60"], tmp_path / "log")
    nameless = subprocess.Popen(["sleep", "60"])
    try:
        told = lines_of(4, [engine], (engine.pid, signal.SIGSTOP), (engine.pid, signal.SIGCONT))
        stopped = f"stands stopped: somebody sent it SIGSTOP; kill -CONT {engine.pid} lets it go on"
        assert told == [f"engine 3 (pid {engine.pid}) {stopped}", f"engine 3 (pid {engine.pid}) goes on"]
        told = lines_of(3, [engine], (nameless.pid, signal.SIGSTOP), (nameless.pid, signal.SIGKILL))
        assert len(told) == 1 and told[0].startswith(f"sleep (pid {nameless.pid}) stands stopped: ")
    finally:
        engine.kill()
        nameless.kill()
        nameless.wait(10)

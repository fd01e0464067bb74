"""A child that stands stopped, and one whose heartbeat is late."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from instep.system import kernel, processes
from instep.system.processes import SupervisedProcess


@pytest.fixture
def child(tmp_path):
    """A process that stands stopped."""
    process = SupervisedProcess("engine 3", ["sleep", "60"], tmp_path / "log")
    os.kill(process.pid, signal.SIGSTOP)
    while kernel.state_of(process.pid) != "stopped":
        time.sleep(0.01)
    yield process
    process.kill()


def looks_at(child, monkeypatch, *times):
    """What looks at these seconds of the clock see, each with whether it found the child stopped too long."""
    clock, me = iter(times), threading.get_ident()  # threads of other tests have their own
    now = lambda: next(clock) if threading.get_ident() == me else time.monotonic()  # noqa: E731
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=now))
    found = [child.fault() == "is stopped" for _ in times]
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("step", [0.1, 0.5, 0.9])
def test_a_stop_of_three_seconds_is_a_fault(child, monkeypatch, step):
    times = [100 + step * n for n in range(50)]
    found = looks_at(child, monkeypatch, *times)
    assert 3.0 <= times[found.index(True)] - 100 < 3.0 + 2 * max(step, 0.5) and all(found[40:])


def test_who_looks_rarely_finds_it_and_who_was_stopped_too_raises_no_alarm(child, monkeypatch):
    """Nobody can tell the two from one late look; a third of the patience is what a late look counts."""
    assert looks_at(child, monkeypatch, 0, 20, 40, 60, 80) == [False, False, False, True, True]
    os.kill(child.pid, signal.SIGCONT)
    while kernel.state_of(child.pid) == "stopped":
        time.sleep(0.01)
    assert looks_at(child, monkeypatch, *range(100, 150)) == [False] * 50
    os.kill(child.pid, signal.SIGSTOP)
    while kernel.state_of(child.pid) != "stopped":
        time.sleep(0.01)
    assert looks_at(child, monkeypatch, 200, 200.5, 201, 3600, 3600.2) == [False] * 5  # then all of them go on


def test_a_heartbeat_is_not_missed_while_nobody_listens(tmp_path, monkeypatch):
    """The run was suspended for an hour: the child's next beat is not there yet when its owner goes on."""
    code = "import time; from instep.system.processes import follow_parent; follow_parent(); time.sleep(600)"
    child = SupervisedProcess("c", [sys.executable, "-c", code], tmp_path / "log", heartbeat=10)
    try:
        deadline = time.monotonic() + 60
        while child._silent is None:
            assert child.fault() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGSTOP)
        while kernel.state_of(child.pid) != "stopped":
            time.sleep(0.01)
        assert child.fault() is None  # reads the last beat
        began = time.monotonic()
        monkeypatch.setattr(kernel, "STOPPED_SECONDS", 1e9)
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: began + passed))
        passed = 3600.0
        assert child.fault() is None
        silent = []
        while (fault := child.fault()) is None:
            silent.append(child._silent)
            passed += 0.9
        assert fault == "has not answered for 10 s" and len(silent) >= 9
    finally:
        monkeypatch.undo()
        child.kill()


def test_a_family_is_found_by_the_parents_of_all_processes():
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        try:
            assert kernel.family(parent.pid) == [parent.pid, grandchild]
            assert kernel.family(os.getpid()).index(parent.pid) < kernel.family(os.getpid()).index(grandchild)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert kernel.family(parent.pid) == []

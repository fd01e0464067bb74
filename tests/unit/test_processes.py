"""The supervisor: no child outlives its owner, and a death is quoted."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from instep.errors import ConfigError
from instep.system import kernel
from instep.system.ports import free_port, free_ports, port_is_free
from instep.system.processes import FolderLock, SupervisedProcess, stop_all
from tests.bounds import allowed

CHILD = "import time; from instep.system.processes import follow_parent; follow_parent(); "
CHILD += "print('up', flush=True); time.sleep(60)"


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_death_is_described_with_signal_and_log(tmp_path):
    child = SupervisedProcess("engine 7", [sys.executable, "-c", CHILD], tmp_path / "log")
    assert wait_until(lambda: "up" in child.log_tail())
    os.kill(child.pid, signal.SIGKILL)
    assert wait_until(lambda: not child.alive())
    text = child.describe()
    assert "engine 7" in text and "SIGKILL" in text and "up" in text
    child.stop()


def test_exit_code_and_last_words_are_quoted(tmp_path):
    child = SupervisedProcess("worker", [sys.executable, "-c", "raise SystemExit('no luck')"], tmp_path / "log")
    assert wait_until(lambda: not child.alive())
    assert "exited with code 1" in child.describe() and "no luck" in child.describe()
    child.stop()


def test_the_first_exception_is_told_where_others_follow_it(tmp_path):
    """As of vLLM, whose server says of its core's death only that there was one, in a long traceback."""
    log = """(APIServer pid=1) ERROR 11-27 00:31 [s.py:7] ValueError: a request of a while ago
    (APIServer pid=1) INFO 11-27 00:31 [a.py:8] Avg prompt throughput
    (APIServer pid=1) WARNING 11-27 00:32 [a.py:9] Found ulimit of 20000. This can cause `OSError: [Errno 24]`.
    (EngineCore pid=2) ERROR 11-27 00:33 [core.py:13] Traceback (most recent call last):
    (EngineCore pid=2) (Worker_TP0 pid=3) ERROR 11-27 00:33 [core.py:13] AssertionError: Error in memory profiling.
    (APIServer pid=1) RuntimeError: Engine core initialization failed.
    """
    code = f"import sys; print({log!r}.replace('    ', '') + 'at\\n' * 20 + 'RuntimeError: see above'); sys.exit(1)"
    child = SupervisedProcess("c", [sys.executable, "-c", code], tmp_path / "log")
    assert wait_until(lambda: not child.alive())
    told = child.describe()
    assert "exited with code 1, and before that said 'AssertionError: Error in memory profiling.';" in told
    assert "OSError" not in told and told.endswith("RuntimeError: see above")


def test_stop_ends_grandchildren_and_those_who_ignore_sigterm(tmp_path):
    stubborn = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    stubborn += "p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    child = SupervisedProcess("stubborn", [sys.executable, "-c", stubborn], tmp_path / "log")
    assert wait_until(lambda: child.log_tail().strip().isdigit())
    grandchild = int(child.log_tail().strip())
    started = time.monotonic()
    stop_all([child], grace=0.5)
    assert time.monotonic() - started < allowed(3)
    assert wait_until(lambda: not psutil.pid_exists(child.pid) and not _running(grandchild))


def test_child_dies_with_a_parent_that_is_killed(tmp_path):
    parent_code = (
        "import sys, time; from pathlib import Path; from instep.system.processes import SupervisedProcess;"
        f"p = SupervisedProcess('c', [sys.executable, '-c', {CHILD!r}], Path({str(tmp_path)!r}) / 'log');"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert wait_until(lambda: "up" in (tmp_path / "log").read_text())
    assert _running(child)
    parent.kill()
    parent.wait(5)
    assert wait_until(lambda: not _running(child), 5)


def test_stacks_on_request(tmp_path):
    child = SupervisedProcess("c", [sys.executable, "-c", CHILD], tmp_path / "log")
    assert wait_until(lambda: "up" in child.log_tail())
    child.dump_stacks()
    assert wait_until(lambda: "most recent call first" in child.log_tail())
    child.stop()


def test_a_stopped_child_is_a_fault_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "STOPPED_SECONDS", 0.4)
    child = SupervisedProcess("c", [sys.executable, "-c", CHILD], tmp_path / "log")
    assert wait_until(lambda: "up" in child.log_tail())
    assert child.fault() is None
    os.kill(child.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert wait_until(lambda: child.fault() == "is stopped")
    assert 0.4 <= time.monotonic() - started < allowed(5) and "SIGSTOP" in child.describe()
    os.kill(child.pid, signal.SIGCONT)
    assert wait_until(lambda: child.fault() is None)
    os.kill(child.pid, signal.SIGSTOP)
    child.stop(grace=5)  # and can be ended all the same
    assert child.fault() == "died (SIGTERM)"


def test_a_stopped_process_under_a_child_is_named_with_the_state_of_the_child(tmp_path):
    """As an embedded engine's HTTP process, or vLLM's core."""
    with_child = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    child = SupervisedProcess("engine 0", [sys.executable, "-c", with_child], tmp_path / "log")
    try:
        assert wait_until(lambda: child.log_tail().strip().isdigit())
        pid = int(child.log_tail())
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: f"kill -CONT {pid} " in child.describe()) and "heartbeat" not in child.remedy()
    finally:
        child.kill()


def test_a_child_ends_with_its_partner_whatever_it_is_busy_with(tmp_path):
    """As an embedded engine that loads its model when its HTTP process is killed."""
    pair = "import os, socket, time; from instep.system.processes import follow_parent\n"
    pair += "ours, theirs = socket.socketpair()\n"
    pair += "pid = os.fork()\nif pid == 0: time.sleep(60)\n"
    pair += "theirs.close(); follow_parent(partner=ours); print(pid, flush=True); time.sleep(60)"
    child = SupervisedProcess("engine 0", [sys.executable, "-c", pair], tmp_path / "log")
    try:
        assert wait_until(lambda: child.log_tail().strip().isdigit())
        os.kill(int(child.log_tail()), signal.SIGKILL)
        assert child.died_within(10) and child.fault() == (
            f"died with exit code 1: process {child.pid}: the process at the other end of its pipe has ended"
        )
    finally:
        child.kill()


def test_a_child_outlives_a_parent_that_does_not_look_at_its_heartbeats(tmp_path):
    many = "import time, instep.system.processes as p; p.BEAT_SECONDS = 0.001; p.follow_parent(); time.sleep(60)"
    child = SupervisedProcess("c", [sys.executable, "-c", many], tmp_path / "log")
    try:
        assert not child.died_within(3.0), child.log_tail()
    finally:
        child.kill()


@pytest.mark.parametrize("seconds", [1.5, 0])  # 0: before the heartbeat that would come by the clock
def test_a_child_that_sends_no_heartbeat_is_a_fault_with_its_stack(tmp_path, seconds):
    hang = "import ctypes, sys; from instep.system.processes import follow_parent; follow_parent(); sys.stdin.read();"
    hang += f"import time; time.sleep({seconds}); lib, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(128)\n"
    hang += "def stuck(): lib.pthread_mutex_lock(lock); print('stuck', flush=True); lib.pthread_mutex_lock(lock)\n"
    child = SupervisedProcess("c", [sys.executable, "-c", hang + "stuck()"], tmp_path / "log", heartbeat=1.2)
    while "stuck" not in child.log_tail():
        assert child.fault() is None
        time.sleep(0.05)
    assert wait_until(lambda: re.fullmatch(r"has not answered for \d+ s", child.fault() or ""))
    assert wait_until(lambda: "in stuck" in child.describe()) and "--heartbeat-timeout" in child.remedy()
    child.stop(grace=0.1)


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    code = "import sys, time; from pathlib import Path; from instep.system.processes import FolderLock;"
    code += "lock = FolderLock(Path(sys.argv[1]), '--run-dir'); print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {other.pid} on ") as caught:
        FolderLock(tmp_path, "--run-dir")
    assert caught.value.where == "--run-dir"
    other.kill()
    other.communicate()
    ours = FolderLock(tmp_path, "--run-dir")  # what a killed process leaves does not matter
    ours.release()
    FolderLock(tmp_path, "--run-dir").release()


def test_ports():
    """None twice, and none that the system gives to whoever asks for any."""
    import socket

    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200 and 20000 <= min(ports) and max(ports) < 30000
    row = free_ports(3)
    assert not set(range(row, row + 3)).intersection(ports) and free_ports(0) == 0
    port = free_port()
    assert port_is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free(port)
    code = f"from instep.system import ports; ports.PORTS = range({row}, {row + 3}); ports.free_port()"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "found no 1 free ports in a row" in other.stderr  # they are ours, though nobody listens yet


def _running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

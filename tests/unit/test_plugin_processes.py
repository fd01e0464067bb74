"""Processes of vLLM's own end with the one that has started them."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from instep_vllm import _wait_for_room

from instep.weights.way import ROOM_VARIABLE
from tests.faults.harness import gone

# A parent like vLLM's server, and a child like its core, in which a thread holds the interpreter's lock for ever.
PARENT = """
import ctypes, multiprocessing, sys, time

def core():
    from instep_vllm import _die_with_parent
    _die_with_parent()
    lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    print("hangs", flush=True)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=core).start()
    time.sleep(300)
"""


def test_a_core_that_hangs_ends_with_its_server(tmp_path):
    (tmp_path / "server.py").write_text(PARENT)
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "hangs\n"
        children = psutil.Process(server.pid).children()
        assert len(children) == 1 and children[0].is_running()
    finally:
        server.kill()
        server.wait(timeout=30)
    assert gone(children, 10)


def test_a_core_waits_until_the_trainer_has_left_the_gpu(tmp_path, monkeypatch):
    room = tmp_path / "room"
    monkeypatch.setenv(ROOM_VARIABLE, f"60:{room}")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(_wait_for_room)
        time.sleep(0.3)
        assert not waits.done()
        room.touch()
        waits.result(timeout=30)
    monkeypatch.setenv(ROOM_VARIABLE, f"0.2:{tmp_path / 'never'}")
    with pytest.raises(TimeoutError, match="the trainer has not left the GPU within 0.2 s"):
        _wait_for_room()

"""Processes of vLLM's own end with the one that has started them."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from instep_engine import ROOM_VARIABLE
from instep_engine.vllm import _wait_for_room
from tests.e2e.commands import gone_within

# A parent like vLLM's server, and a child like its core, in which a thread holds the interpreter's lock for ever.
PARENT = """
import ctypes, multiprocessing, sys, time
from instep_engine.vllm import _die_with_parent

def core():
    _die_with_parent()
    lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    print("hangs", flush=True)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)

if __name__ == "__main__":
    _die_with_parent()
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
    assert gone_within(children, 10)


# A core whose server has ended before the plugin is loaded there.
ORPHAN = """
import multiprocessing, os, sys, time
from instep_engine.vllm import _die_with_parent

def core():
    server = os.getppid()
    print("imports", flush=True)
    while os.getppid() == server:
        time.sleep(0.01)
    _die_with_parent()
    time.sleep(300)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=core).start()
    time.sleep(300)
"""


def test_a_core_ends_whose_server_ended_as_it_began(tmp_path):
    (tmp_path / "server.py").write_text(ORPHAN)
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "imports\n"
        children = psutil.Process(server.pid).children()
        assert len(children) == 1
    finally:
        server.kill()
        server.wait(timeout=30)
    assert gone_within(children, 10)


# A server that has loaded vLLM's plugins and a core that is forked from it, which loads them as a spawned one does.
FORKED = """
import multiprocessing, os, sys
from vllm.plugins import load_general_plugins

def core(path):
    os.environ["INSTEP_ROOM"] = f"0.1:{path}"
    try:
        load_general_plugins()
    except TimeoutError as error:
        print(error, os.environ["TRITON_CACHE_DIR"], flush=True)

if __name__ == "__main__":
    load_general_plugins()
    process = multiprocessing.get_context("fork").Process(target=core, args=sys.argv[1:])
    process.start()
    process.join(300)
"""


@pytest.mark.vllm
def test_a_core_that_was_forked_from_its_server_loads_the_plugin_again(tmp_path):
    (tmp_path / "server.py").write_text(FORKED)
    env = {
        **os.environ,
        "INSTEP_DIE_WITH_PARENT": "1",
        "TRITON_HOME": "/home-of-triton",
        "VLLM_PLUGINS": "instep_engine",
    }
    env.pop("TRITON_CACHE_DIR", None)
    words = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "room")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    said = (
        f"the trainer has not left the GPU within 0.1 s ({tmp_path / 'room'} is missing) /home-of-triton/.triton/cache"
    )
    assert said in done.stdout, done.stdout + done.stderr


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

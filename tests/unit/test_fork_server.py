"""Programs that are forked from a fork server, compared with the same ones in an interpreter of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.bounds import until
from tests.e2e.commands import words_of
from tests.forks import COLD, ENVIRONMENT, SERVER, Popen

PROGRAM = [sys.executable, "-m", "tests.unit.program_about_itself"]


SLEEPER = [sys.executable, "-m", "http.server", "0", "-b", "127.0.0.1"]
CUSTOM = "import os, sys; os.environ['CUSTOM'] = ' '.join(sys.orig_argv[2:])"


def outcome(start, words, folder, **given):
    out = {}
    with (folder / f"{start.__name__}.err").open("w+b") as errors:
        passed, other = os.pipe()
        process = start(
            [*PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=[passed],
            **given,
        )
        text, _ = process.communicate("a line", timeout=120)
        os.close(passed), os.close(other)
        errors.seek(0)
        out |= {"code": process.returncode, "errors": errors.read().decode()}
    return json.loads(text) | out


@pytest.mark.parametrize("words", [["0"], ["--what", "ever you", "7"], ["--say", "words"], ["--raise"], ["--kill"]])
@pytest.mark.parametrize("session", [True, False])
def test_a_forked_program_is_one_in_an_interpreter_of_its_own(tmp_path, words, session):
    random.seed()
    given = {"cwd": tmp_path, "start_new_session": session}
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    given["env"] = {**os.environ, "PYTHONPATH": path, "X": f"{random.random()}\nü"}
    before = os.umask(mask := 0o027 if session else 0o007)
    try:
        forked, cold = (outcome(start, words, tmp_path, **given) for start in (Popen, COLD))
    finally:
        os.umask(before)
    assert forked["umask"] == mask
    assert forked["environment"]["CUSTOM"].startswith(PROGRAM[2])
    assert forked["environment"]["X"] == given["env"]["X"] and forked["folder"] == str(tmp_path)
    ignored = {str(int(n)) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN}
    for found in (forked, cold):  # the file and line of a traceback differ in what called the program
        *_, found["errors"] = found["errors"].splitlines()
        for number in ignored:  # by this process, perhaps only since its fork server began
            del found["signals"][number]
    assert forked == cold


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=f"started no process: .*No such file.*{tmp_path}/none"):
        SERVER.start(SLEEPER, ENVIRONMENT, (0, 1, 2), cwd=f"{tmp_path}/none")
    assert SERVER.start([*PROGRAM, "3"], ENVIRONMENT, (0, 2, 2)).wait(60) == 3  # the server goes on


def test_one_thread_ends_what_another_waits_for():
    process = SERVER.start([*SLEEPER], ENVIRONMENT, (0, 1, 2))
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait(60))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert process.poll() is None
    process.kill()
    for thread in threads:
        thread.join(60)
    assert codes == [-9, -9] and process.poll() == -9


def test_two_that_are_forked_draw_other_numbers():
    command = [*PROGRAM, "--draw", "0"]
    drawn = [subprocess.run(command, input="", capture_output=True, text=True).stderr for _ in range(2)]
    assert all("drawn" in text for text in drawn) and drawn[0] != drawn[1]


@pytest.mark.parametrize("disable", ["1", "0", None])
def test_the_compiler_is_disabled_as_the_environment_says(disable):
    env = {**ENVIRONMENT, "TORCH_COMPILE_DISABLE": disable}
    command, env = [*PROGRAM, "--compiler", "0"], {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(command, input="", capture_output=True, text=True, env=env)
    assert f"disabled {disable == '1'}" in done.stderr


def test_what_is_forked_ends_with_its_server_and_that_with_its_owner():
    code = "import os, sys, time; from instep.system.fork_server import ForkServer; s = ForkServer.fork(); "
    code += "s.preload([], os.environ); one = s.start([sys.executable, '-m', 'http.server', '0', '-b', '127.0.0.1'], "
    code += "os.environ, (0, 2, 2)); print(one.pid, flush=True); time.sleep(600)"
    with COLD([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        pid = int(owner.stdout.readline())
        ours = psutil.Process(owner.pid).children(recursive=True)
        until(lambda: [words_of(p)[:2] for p in ours] == [["instep:", "fork"], [sys.executable, "-m"]])
        owner.kill()
    assert ours[1].pid == pid
    until(lambda: not any(p.is_running() for p in ours))


def test_one_whose_server_was_killed_was_killed():
    code = "import os, sys, psutil, time; from instep.system.fork_server import ForkServer; s = ForkServer.fork(); "
    code += "s.preload([], os.environ); one = s.start([sys.executable, '-m', 'http.server', '0', '-b', '127.0.0.1'], "
    code += "os.environ, (0, 2, 2)); (server,) = psutil.Process().children(); server.kill(); print(one.wait(60)); "
    code += "os.kill(one.pid, 9)"  # it follows nobody
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "-9\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "changes", "fits"),
    [
        ([sys.executable, "-m", "x"], {}, True),
        ([sys.executable, "-m", "x"], {"OMP_NUM_THREADS": "3", "PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ([sys.executable, "-m", "x"], {"PYTHONHASHSEED": "1"}, False),
        ([sys.executable, "-m", "x"], {"LD_PRELOAD": "x.so"}, False),
        ([sys.executable, "-c", "x"], {}, False),
        (["sleep", "1"], {}, False),
    ],
)
def test_only_what_imports_would_not_change_is_forked(argv, changes, fits):
    got = SERVER.fits(argv, {**ENVIRONMENT, **changes})
    assert got == fits, (sys.executable, SERVER._early)

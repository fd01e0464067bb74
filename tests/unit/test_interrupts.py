"""Ctrl-C and SIGTERM end a command with exit code 130, wherever they fall."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import cold

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_command_with_130(number):
    code = (
        "import sys, time, instep.cli as cli\n"
        "def wait(words):\n"
        "    try: print('ready', flush=True); time.sleep(60)\n"
        "    finally: print('cleaned up', flush=True)\n"
        "cli._run = wait\n"
        "sys.exit(cli.main(['train']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, error) == (130, "cleaned up\n", "interrupted\n")


def test_an_interrupt_in_an_exec_ends_python_m_with_130(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import sys, instep.cli as cli\n"
        "cli._run = lambda words: exec('raise KeyboardInterrupt')\n"
        "sys.exit(cli.main(['train']))"
    )
    words = [sys.executable, "-m", "interrupted"]
    with cold():  # the interpreter's own end is what is tested
        done = subprocess.run(words, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")

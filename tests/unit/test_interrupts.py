"""Ctrl-C and SIGTERM end a command with exit code 130, wherever they fall."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

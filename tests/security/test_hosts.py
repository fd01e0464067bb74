"""Hosts whose shared memory cannot be written, or without loopback: one error that says what to do."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import ENVIRONMENT, grpo_arguments

HOSTS = {
    "shared memory": ("-rm", "mount -t tmpfs -o ro none /dev/shm && ", "shared memory cannot be used: /dev/shm"),
    "loopback": ("-rn", "", "no connection over 127.0.0.1"),
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_ends_with_a_remedy(tmp_path: Path, host: str) -> None:
    flags, before, what = HOSTS[host]
    inside = ["unshare", flags, "sh", "-c"]
    allowed = subprocess.run([*inside, f"{before}true"], capture_output=True, text=True, timeout=60, check=False)
    if allowed.returncode:
        pytest.skip(f"this host makes no such namespaces: {allowed.stderr.strip()}")
    make_checkpoint(tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 8)
    words = [sys.executable, "-m", "instep.cli", *grpo_arguments(tmp_path, tmp_path / "run")]
    command = [*inside, f"{before}exec {shlex.join(words)}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2 and f"ConfigError: {what}" in done.stderr, done.stderr[-3000:]
    assert "remedy: " in done.stderr and "Traceback" not in done.stderr

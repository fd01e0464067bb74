"""Hosts whose shared memory cannot be written, or without loopback: one error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import ENVIRONMENT, grpo_arguments
from tests.security.unshared import NOT_ALLOWED

HOSTS = {"shared memory": "shared memory cannot be used: /dev/shm", "loopback": "no connection over 127.0.0.1"}


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_ends_with_a_remedy(tmp_path: Path, host: str) -> None:
    make_checkpoint(tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 8)
    words = [sys.executable, "-m", "tests.security.unshared", host, *grpo_arguments(tmp_path, tmp_path / "run")]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip(f"this host makes no such namespaces: {done.stderr.strip()}")
    assert done.returncode == 2 and f"ConfigError: {HOSTS[host]}" in done.stderr, done.stderr[-3000:]
    assert "remedy: " in done.stderr and "Traceback" not in done.stderr

"""The versions of packages, the git state and the machine of a run, without importing the packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import instep
from instep.system.gpus import gpus_here

PACKAGES = "torch transformers tokenizers safetensors megatron-core peft vllm sglang ray numpy".split()


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, None if it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return what a command prints, None if it is absent, fails or takes more than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the git checkout in `folder` and whether it has changes; (None, None) without a checkout."""
    if not (folder / ".git").exists():
        return None, None
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    status = _output("git", "-C", str(folder), "status", "--porcelain")
    return commit, None if status is None else bool(status)


def versions() -> dict[str, Any]:
    """Return the versions of Python, instep and the packages it runs with, the git commit and the machine."""
    commit, dirty = git_state(Path(instep.__file__).resolve().parent.parent)
    return {
        "instep": instep.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpu": [gpu.name for gpu in gpus_here()] or None,
    }

"""Only its user can read what a run writes: the modes of files, and texts without credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.system.shared import shared_by_runs

UMASK_VARIABLE = "INSTEP_UMASK"  # the user's umask, for children
_SECRET = re.compile(r"(wandb|api|access|secret)_?key$|password|secret|(hf|api|auth|access)_token$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_QUERY = re.compile(r"([?&](?:[\w-]*(?:key|token|secret|password|signature)|sig)=)[^&\s'\"]+", re.IGNORECASE)


@contextmanager
def private_files() -> Iterator[None]:
    """Make new files of this process and its children readable by the user only: prompts, samples, settings, logs."""
    undo = _make_private()
    try:
        yield
    finally:
        undo()


@shared_by_runs
def _make_private() -> Callable[[], None]:
    before, outer = os.umask(0o077), os.environ.get(UMASK_VARIABLE)
    os.environ[UMASK_VARIABLE] = outer or f"{before:o}"

    def undo() -> None:
        os.umask(before)
        if outer is None:
            del os.environ[UMASK_VARIABLE]

    return undo


@contextmanager
def users_files() -> Iterator[None]:
    """Give new files in the block the modes of the user's umask: for caches shared with other programs."""
    before = os.umask(0)
    os.umask(int(os.environ.get(UMASK_VARIABLE, f"{before:o}"), 8))
    try:
        yield
    finally:
        os.umask(before)


def share(folder: Path) -> None:
    """Give an exported model, without prompts or settings, the modes of the user's own umask."""
    if (mask := os.environ.get(UMASK_VARIABLE)) is None:
        return
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~int(mask, 8))


def without_credentials(text: str) -> str:
    """Return `text` without user, password, keys and tokens in its URLs."""
    return _QUERY.sub(r"\1***", _USER.sub("***", text))


def without_secrets(value: Any) -> Any:
    """Copy nested dicts and lists without entries whose names mean secrets (`wandb_key`, ...), and without the
    credentials in URLs."""
    if isinstance(value, Mapping):
        return {str(k): without_secrets(v) for k, v in value.items() if not _SECRET.search(str(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return without_credentials(value) if isinstance(value, str) else value

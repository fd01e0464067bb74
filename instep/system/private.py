"""What a run writes is for its user alone: the modes of files, and texts without credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UMASK_VARIABLE = "INSTEP_UMASK"  # that of the user, for children
_SECRET = re.compile(r"(wandb|api|access|secret)_?key$|password|secret|(hf|api|auth|access)_token$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_QUERY = re.compile(r"([?&](?:[\w-]*(?:key|token|secret|password|signature)|sig)=)[^&\s'\"]+", re.IGNORECASE)


@contextmanager
def private_files() -> Iterator[None]:
    """In the block this process, and the children that it starts, make files that nobody else can read: prompts,
    samples, settings, logs."""
    before, outer = os.umask(0o077), os.environ.get(UMASK_VARIABLE)
    os.environ[UMASK_VARIABLE] = outer or f"{before:o}"
    try:
        yield
    finally:
        os.umask(before)
        if outer is None:
            del os.environ[UMASK_VARIABLE]


@contextmanager
def users_files() -> Iterator[None]:
    """In the block new files get modes by the user's umask: for caches that instep shares with other programs."""
    before = os.umask(0)
    os.umask(int(os.environ.get(UMASK_VARIABLE, f"{before:o}"), 8))
    try:
        yield
    finally:
        os.umask(before)


def share(folder: Path) -> None:
    """Give a model that is handed out, without prompts or settings, the modes that the user's own umask means."""
    if (mask := os.environ.get(UMASK_VARIABLE)) is None:
        return
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~int(mask, 8))


def without_credentials(text: str) -> str:
    """`text` without user and password, and without keys and tokens, in the URLs that it holds."""
    return _QUERY.sub(r"\1***", _USER.sub("***", text))


def without_secrets(value: Any) -> Any:
    """Copy nested dicts and lists without the entries that their names show to be secrets (`wandb_key`, ...), and
    without the credentials in URLs."""
    if isinstance(value, Mapping):
        return {str(k): without_secrets(v) for k, v in value.items() if not _SECRET.search(str(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return without_credentials(value) if isinstance(value, str) else value

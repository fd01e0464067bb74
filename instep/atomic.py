"""Writing files and folders completely or not at all: beside their place, then renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` for the block to write, renamed to `path` at the end of the block.

    After an error it is removed, and `path` stays as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, flush: bool = False) -> None:
    """Write `text` as UTF-8; with `flush`, its bytes are on the disk before the file takes its place."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def replace_folder(new: Path, place: Path, old: Path) -> None:
    """Rename the folder `new` to `place`, and the folder that was there to `old`, which is then removed.

    If the process is killed between the two renames, only `old` exists.
    """
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)

"""Write files and folders completely or not at all: first beside their place, then renamed."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path` to write, and rename it to `path` at the end of the block.

    After an error it is removed, and `path` does not change.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, flush: bool = False) -> None:
    """Write `text` as UTF-8; with `flush`, its bytes and its name are on the disk on return."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        if flush:
            file.flush()
            os.fsync(file.fileno())
    if flush:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, if its file system can do that."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def replace_folder(new: Path, place: Path, old: Path, keep: Path | None = None) -> None:
    """Rename the folder `new` to `place`, and the earlier folder there to `old`, which is then removed.

    If the process is killed between the two renames, only `old` exists; a later call keeps it until `new` is there.

    Args:
        keep: the earlier content gets this name instead of being removed.
    """
    sync_folder(new)
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(place, old)
    os.rename(new, place)
    sync_folder(place.parent)
    if keep is not None and old.exists():
        os.rename(old, keep)
    shutil.rmtree(old, ignore_errors=True)


def free_name(folder: Path, stem: str) -> Path:
    """Return the path `folder/<stem>-<n>` with the number after the highest existing one."""
    numbers = [p.name[len(stem) + 1 :] for p in folder.glob(f"{glob.escape(stem)}-*")]
    return folder / f"{stem}-{1 + max((int(n) for n in numbers if n.isdigit()), default=0)}"


def link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it where links are not possible, as to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

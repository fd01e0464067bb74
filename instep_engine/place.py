"""The allowed places of weights that an engine is asked to load. So its answers reveal nothing about any other file.

A place is a folder of a run (`scratch.py`): it has such a name, belongs to the engine's own user, is closed to all
others, and is not a link. Some file systems set owners and modes themselves. There, the folder must look like a new
file of the engine. This file needs no torch.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

SYNC, GOLDEN = "instep-sync-", "instep-golden-"  # prefixes of the folders' names


class NoPlace(Exception):
    """The path is not in the folder of a run, or another user may have put it there."""


def open_bucket(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file of weights in shared memory, for reading unless `flags` says more.

    Raises:
        NoPlace: it is not in the folder of a run.
        OSError: there is no such file.
    """
    folder, owner = _open_folder(Path(path).parent, SYNC)
    try:
        fd = os.open(Path(path).name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check(os.fstat(fd), owner, path)
    except NoPlace:
        os.close(fd)
        raise
    return fd


def check_memory_folder(path: str) -> None:
    """Check the folder in which an engine shares its weights. Raises NoPlace; OSError if there is no such folder."""
    os.close(_open_folder(Path(path), SYNC)[0])


def check_checkpoint(path: str) -> None:
    """Check the folder of a checkpoint and all of its files. Raises NoPlace; OSError if there is no such folder."""
    folder, owner = _open_folder(Path(path).parent, GOLDEN)
    os.close(folder)
    if Path(path).name == ".." or not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NoPlace(f"{path} is not a folder")
    for entry in os.scandir(path):
        if entry.name.endswith((".safetensors", ".json")):
            _check(os.lstat(entry.path), owner, entry.path)


def _open_folder(folder: Path, prefix: str) -> tuple[int, int]:
    """Return a descriptor of the folder, and the user who owns our files there."""
    if not folder.name.startswith(prefix) or not folder.is_absolute():
        raise NoPlace(f"{folder} is not the folder of a run ({prefix}*)")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(fd)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return fd, found.st_uid
    ours = _file_of_ours(fd)
    if ours is not None and found.st_uid == ours.st_uid and (ours.st_mode & 0o077 or not found.st_mode & 0o077):
        return fd, found.st_uid
    os.close(fd)
    raise NoPlace(
        f"{folder} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; the engine runs "
        f"as user {os.geteuid()} and reads only its own folders, closed to others"
    )


def _file_of_ours(folder: int) -> os.stat_result | None:
    """Return how a new file of this user looks there with mode 0600; None if we cannot write one.

    A file system may have one owner and one mode for everything (CIFS, FUSE), or show root as nobody (NFS).
    """
    name = f".owner-{secrets.token_hex(8)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=folder)


def _check(found: os.stat_result, owner: int, path: str) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_nlink != 1:
        raise NoPlace(f"{path} is not a regular file with one link, owned by user {owner}")


def process_mark(pid: int) -> str:
    """Return a text that is unique to a process of this host; "" for one that has ended, or is hidden from us."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # see proc(5)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {pid} {fields[19]}"


def lives(mark: str) -> bool:
    """Return whether the process of a mark lives."""
    pid = mark.split(" ")[1] if mark.count(" ") == 2 else ""
    return pid.isdigit() and process_mark(int(pid)) == mark

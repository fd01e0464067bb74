"""Temporary folders whose lock shows if their owner lives; those of killed processes are removed.

The lock (flock) is on a file in the folder. Processes in other containers on the same file system see it, too, and
the kernel releases it however its owner ends. On a file system shared by hosts the lock may work on one host only. So
the file names its host, and folders of other hosts stay. A folder without that file is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import socket
import tempfile
from pathlib import Path

from instep.errors import ConfigError
from instep.system import locks

LOCK = ".instep-scratch"
KINDS = "instep-*", ".instep-*"  # patterns of the folders; exports are hidden


def memory_root() -> Path:
    """Return the folder of shared memory, or without one the folder of temporary files."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def memory_scratch(prefix: str) -> Scratch:
    """Return a scratch folder in shared memory, for data that processes pass to each other.

    Raises:
        ConfigError: no folder can be made there.
    """
    root = memory_root()
    try:
        return Scratch(prefix, root)
    except OSError as error:
        what = f"shared memory cannot be used: {root} takes no folder ({error.strerror or error})"
        remedy = "mount it with write access, or make room (docker: --shm-size=8g)"
        raise ConfigError(what, where=str(root), remedy=remedy) from error


class Scratch:
    """A new folder of this process, with mode 0700. First, folders of killed processes beside it are removed.

    Args:
        prefix: the beginning of its name; it starts with "instep-".
        root: its parent; None: the folder of temporary files.

    Attributes:
        path: the folder, absolute.
    """

    def __init__(self, prefix: str, root: Path | None = None):
        root = Path(root or tempfile.gettempdir()).absolute()
        sweep(root)
        self.path = Path(tempfile.mkdtemp("", prefix, root))
        new = self.path / f"{LOCK}-new"
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # not inherited by children
        with contextlib.suppress(OSError):  # a file system without locks: no process sweeps there
            locks.lock(self._fd)
        os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()} {boot_id()}".encode())
        new.rename(self.path / LOCK)  # locked before another process can see it

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self._fd = self._fd, -1
        locks.close(fd)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


@functools.cache
def boot_id() -> str:
    """Return the kernel's id of this host since its start, the same in all of its containers; "" without one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _of_this_host(lock: str) -> bool:
    """Return whether a process of this host wrote `lock`: the host has not restarted since, or has the same name."""
    name, _, boot = lock.partition(" on ")[2].partition(" ")
    return bool(boot) and boot == boot_id() or bool(name) and name == socket.gethostname()


def left(root: Path, *, remove: bool = False) -> list[Path]:
    """Return this user's folders in `root` whose owner is gone; with `remove` also remove them."""
    return [path for path in sorted(p for kind in KINDS for p in root.glob(kind)) if _abandoned(path, remove=remove)]


def sweep(root: Path) -> None:
    """Remove the folders in `root` whose owner is gone."""
    left(root, remove=True)


def export_folder(save_hf: str, rollout_id: int) -> Path:
    """Return the folder of an export to `--save-hf` after a rollout; `{step}` counts from 1.

    Raises: KeyError, IndexError, ValueError, AttributeError for another field.
    """
    return Path(save_hf.format(rollout_id=rollout_id, step=rollout_id + 1))


def roots(run_dir: Path) -> list[Path]:
    """Return the folders where a killed run leaves something; an export sweeps its own parent."""
    return list(dict.fromkeys([memory_root(), Path(tempfile.gettempdir()), run_dir]))


def _abandoned(path: Path, *, remove: bool) -> bool:
    """Return whether the folder's owner is gone; with `remove`, remove the folder while its lock is held."""
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid != os.geteuid():
                return False
            fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # not a folder of ours, or locked, or a file system without locks, where the owner is unknown
            return False
        if not _of_this_host(os.pread(fd, 500, 0).decode(errors="replace")):
            return False
        if remove:
            shutil.rmtree(path, ignore_errors=True)
        return True

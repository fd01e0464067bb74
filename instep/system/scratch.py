"""Temporary folders that show by a lock whether their owner lives; those of killed processes are swept.

The lock (flock) is on a file in the folder. Processes in other containers that share the file system see it, too, and
the kernel drops it however its owner ends. On a file system that hosts share it may hold on one host alone, so the file
names its host, and those of other hosts stay. A folder without that file is nobody's to remove.
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
KINDS = "instep-*", ".instep-*"  # patterns of the folders; those of exports are hidden


def memory_root() -> Path:
    """Return the folder of shared memory; without one that of temporary files."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def memory_scratch(prefix: str) -> Scratch:
    """Return a scratch folder in shared memory, for what processes hand to each other.

    Raises:
        ConfigError: none can be made there.
    """
    root = memory_root()
    try:
        return Scratch(prefix, root)
    except OSError as error:
        what = f"shared memory cannot be used: {root} takes no folder ({error.strerror or error})"
        remedy = "mount it so that you may write there, or make room (docker: --shm-size=8g)"
        raise ConfigError(what, where=str(root), remedy=remedy) from error


class Scratch:
    """A new folder of this process, with mode 0700. What killed processes have left beside it is removed first.

    Args:
        prefix: of its name; it begins with "instep-".
        root: where it lies; None: among the temporary files.

    Attributes:
        path: the folder, absolute.
    """

    def __init__(self, prefix: str, root: Path | None = None):
        root = Path(root or tempfile.gettempdir()).absolute()
        sweep(root)
        self.path = Path(tempfile.mkdtemp("", prefix, root))
        new = self.path / f"{LOCK}-new"
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # not inherited by children
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            locks.lock(self._fd)
        os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()} {boot_id()}".encode())
        new.rename(self.path / LOCK)  # locked before anybody can see it

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self._fd = self._fd, -1
        locks.close(fd)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


@functools.cache
def boot_id() -> str:
    """Return the kernel's name of this host since it was started, alike in all of its containers; "" if it has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _of_this_host(lock: str) -> bool:
    """Whether a process of this host has written `lock`: it has not restarted since, or it still has its name."""
    name, _, boot = lock.partition(" on ")[2].partition(" ")
    return bool(boot) and boot == boot_id() or bool(name) and name == socket.gethostname()


def left(root: Path, *, remove: bool = False) -> list[Path]:
    """Return the folders in `root` whose owner is gone, of this user; with `remove` they are removed."""
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
    """Return the folders in which a run leaves something when it is killed; an export sweeps its own parent."""
    return list(dict.fromkeys([memory_root(), Path(tempfile.gettempdir()), run_dir]))


def _abandoned(path: Path, *, remove: bool) -> bool:
    """Return whether the folder's owner is gone; with `remove` it is removed while its lock is held."""
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid != os.geteuid():
                return False
            fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is no folder of ours; or is held; or the file system has no locks, and nobody can tell
            return False
        if not _of_this_host(os.pread(fd, 500, 0).decode(errors="replace")):
            return False
        if remove:
            shutil.rmtree(path, ignore_errors=True)
        return True

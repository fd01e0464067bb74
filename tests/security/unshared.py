"""Runs `instep` in namespaces of its own: `python -m tests.security.unshared "shared memory"|loopback WORD ...`.

The program `unshare` does the same, but what it starts is forked from no server of the tests (`tests/forks.py`).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

NEW_MOUNTS, NEW_USERS, NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
READ_ONLY, RECURSIVE, PRIVATE = 1, 1 << 14, 1 << 18
NOT_ALLOWED = 77  # the exit code where a host makes no such namespaces

LIBC = ctypes.CDLL(None, use_errno=True)


def checked(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(host: str) -> None:
    """Be root of a namespace whose shared memory cannot be written, or whose loopback is down."""
    user, group = os.getuid(), os.getgid()
    checked(LIBC.unshare(NEW_USERS | (NEW_NETWORK if host == "loopback" else NEW_MOUNTS)))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if host == "shared memory":
        checked(LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
        checked(LIBC.mount(b"none", b"/dev/shm", b"tmpfs", READ_ONLY, None))


if __name__ == "__main__":
    try:
        enter(sys.argv[1])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_ALLOWED)
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("instep.cli", run_name="__main__", alter_sys=True)

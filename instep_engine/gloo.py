"""Groups of gloo that other users of the host cannot end.

A group listens for its members as long as it lives. If connections of any user have used up the descriptors (accept:
EMFILE), it aborts its process. But it needs its listener only until all members are connected, when its constructor
returns. From then on the kernel drops what comes there. Each group has its own listener, so groups that are made later
can still form.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

SO_ATTACH_FILTER, RETURN = 26, 0x06  # see socket(7) and linux/filter.h
_lock = threading.Lock()


def guard_groups() -> None:
    """Let every group of gloo made in this process from now on close its listener when it is complete."""
    if sys.platform == "linux" and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0" and dist.is_gloo_available():
        real = dist.ProcessGroupGloo
        if not isinstance(real, _Guarded):
            guarded = _Guarded("ProcessGroupGloo", (), {"real": real})
            distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo = guarded  # type: ignore[assignment, misc]


def make_devices(**wanted: str) -> tuple[list[Any], set[int]]:
    """Return devices of gloo for a group of `dist.ProcessGroupGloo`, and their listeners, which `shut` closes.

    Args:
        wanted: the `hostname` or the `interface` of one; default: those of the environment, or gloo's own choice.
    """
    gloo = dist.ProcessGroupGloo
    names = [{"interface": name} for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with _lock:
        before = _listeners()
        devices = [gloo.create_device(**one) for one in ([wanted] if wanted else names)]
        devices = devices or [gloo.create_default_device()]
        return devices, _listeners() - before


class _Guarded(type):
    """Replaces the class `real`: it makes its objects, and answers isinstance for them."""

    real: Any

    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: Any = timedelta(minutes=30)) -> Any:
        if not isinstance(timeout, timedelta):  # options, with the caller's devices
            return cls.real(store, rank, size, timeout)
        options = cls.real._Options()
        options._devices, doors = make_devices()
        options._timeout, options._threads = timeout, 2 * len(options._devices)
        group = cls.real(store, rank, size, options)
        shut(doors)
        return group

    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def _listeners() -> set[int]:
    """Return the descriptors of this process that are listening TCP sockets."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
        except OSError:  # another thread has closed it meanwhile
            continue
    return found


def shut(listeners: set[int]) -> None:
    """Let the kernel drop each packet for the listeners, by a filter that accepts no byte (on Linux)."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", RETURN, 0, 0, 0))
    for listener in listeners:
        door = socket.socket(fileno=listener)  # not a new descriptor: there may be none left
        try:
            door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(drop)))
        finally:
            door.detach()

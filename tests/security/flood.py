"""Another user of the host who opens connections to a port and holds them."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

CONNECTIONS = 1100  # more than a process has descriptors of by default (1024)


def room_for_descriptors(num: int = 4096) -> None:
    """Let this process have so many; a process that is attacked has the default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num if hard == resource.RLIM_INFINITY else min(num, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextlib.contextmanager
def flooded(port: int, num: int = CONNECTIONS, send: bytes = b"") -> Iterator[int]:
    """Hold up to `num` connections to a port of 127.0.0.1 in the block; yields how many came about."""
    room_for_descriptors()
    held = []
    with contextlib.ExitStack() as all_of_them:
        failed = 0
        while len(held) < num and failed < 3:
            try:
                one = all_of_them.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1.0))
                one.sendall(send)
                held.append(one)
            except OSError:
                failed += 1
        yield len(held)

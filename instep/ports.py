"""Choosing free ports for the servers of a run."""

from __future__ import annotations

import collections
import errno
import secrets
import socket
import time

from instep.errors import ConfigError

PORTS = range(20000, 30000)  # below the ephemeral ports of connections, above Ray's workers
TRIES = 1000
_given: collections.deque[int] = collections.deque(maxlen=1000)  # the last ones of this process, not given again soon


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; see `free_ports`."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` consecutive ports that were free a moment ago; 0 if `count` is 0.

    No outgoing connection of this host gets them before the server listens, which takes vLLM seconds.

    Raises:
        ConfigError: none were found after many tries.
    """
    if not count:
        return 0
    for _ in range(TRIES):
        first = PORTS.start + secrets.randbelow(len(PORTS) - count + 1)
        ports = range(first, first + count)
        if not set(ports).intersection(_given) and all(_can_bind(port, host, reuse=False) for port in ports):
            _given.extend(ports)
            return first
    raise ConfigError(
        f"found no {count} free ports in a row from {PORTS.start} to {PORTS.stop - 1}",
        where=host,
        remedy="end what listens there, or name ports with --engine-port",
    )


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server, which sets SO_REUSEADDR, could listen on the port."""
    return _can_bind(port, host, reuse=True)


def _can_bind(port: int, host: str, reuse: bool) -> bool:
    """Without `reuse` also False for a port with connections in TIME_WAIT, or bound without listening."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise  # an address that is not of this host, say
            return False
    return True


def choose_port(port: int | None, host: str, patience: float = 0.0) -> int:
    """`port` if it is free within `patience` seconds, otherwise raise ConfigError; for None, a free port."""
    deadline = time.monotonic() + patience
    while port is not None and not port_is_free(port, host):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"port {port} is taken", where="--engine-port", remedy="name a free port, or leave the flag out"
            )
        time.sleep(0.05)
    return port or free_port(host)

"""Ports for the servers of a run."""

from __future__ import annotations

import collections
import secrets
import socket
import time

from instep.errors import ConfigError

PORTS = range(20000, 30000)  # below those that systems give to connections, above Ray's workers
_given: collections.deque[int] = collections.deque(maxlen=1000)  # here; others choose at random, too


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, and that the system gives nobody by itself.

    vLLM listens only when its model is loaded. Until then any connection out of this host could get a port of the
    range from which systems choose (32768 and above, as a rule).
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if port not in _given and port_is_free(port, host):
            _given.append(port)
            return port


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many free ports in a row; 0 for none."""
    while count:
        first = free_port(host)
        others = range(first + 1, first + count)
        if all(port not in _given and port_is_free(port, host) for port in others):
            _given.extend(others)
            return first
    return 0


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose_port(port: int | None, host: str, patience: float = 0.0) -> int:
    """`port` if it is free within `patience` seconds, a free one for None. Raises ConfigError."""
    deadline = time.monotonic() + patience
    while port is not None and not port_is_free(port, host):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"port {port} is taken", where="--engine-port", remedy="name a free port, or leave the flag out"
            )
        time.sleep(0.05)
    return port or free_port(host)

"""Free ports for the servers of a run, and the users who listen at a port."""

from __future__ import annotations

import collections
import errno
import ipaddress
import secrets
import socket
import struct
import time

from instep.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)  # below the ephemeral ports of connections, above Ray's workers
TRIES = 1000
_SOCK_DIAG, _BY_FAMILY, _DUMP, _LISTEN = 4, 20, 0x301, 10  # see sock_diag(7)
_END, _NO_COOKIE = (2, 3), 0xFFFFFFFF  # NLMSG_ERROR and NLMSG_DONE; INET_DIAG_NOCOOKIE
_KEPT = 256
_given: collections.deque[socket.socket] = collections.deque()  # bound to the last returned ports


def check_loopback() -> int:
    """Connect to a test server on loopback, where engines and ranks are reached; return the port of the test.

    Raises:
        ConfigError: this host allows no connection there.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                return int(client.getpeername()[1])
    except OSError as error:
        raise ConfigError(
            f"no connection over {LOOPBACK}: {error.strerror or error}",
            where="this host",
            remedy="engines and ranks are reached there: allow it (a sandbox, a firewall, `ip link set lo up`)",
        ) from error


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that was free a moment ago; see `free_ports`."""
    return free_ports(1, host)


def free_ports(count: int, host: str = LOOPBACK) -> int:
    """Return the first of `count` consecutive ports that were free a moment ago; 0 if `count` is 0.

    No outgoing connection of this host gets them before the server listens, which takes vLLM seconds. No other process
    gets them here either, as long as this process lives (and has not got 256 more). A socket is bound to each
    port without listening, so that a server with SO_REUSEADDR can still bind to it.

    Raises:
        ConfigError: no free ports after many tries.
    """
    if not count:
        return 0
    for _ in range(TRIES):
        first = PORTS.start + secrets.randbelow(len(PORTS) - count + 1)
        found = [_bound(port, host, reuse=False) for port in range(first, first + count)]
        bound = [one for one in found if one is not None]
        if len(bound) == count:
            for one in bound:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _given.extend(bound)
            bound = [_given.popleft() for _ in range(len(_given) - _KEPT)]
        for one in bound:
            one.close()
        if None not in found:
            return first
    what = f"found no {count} free ports in a row from {PORTS.start} to {PORTS.stop - 1}"
    raise ConfigError(what, where=host, remedy="end the servers that listen there, or name ports with --engine-port")


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server, which sets SO_REUSEADDR, could listen on the port."""
    bound = _bound(port, host, reuse=True)
    if bound is not None:
        bound.close()
    return bound is not None


def _bound(port: int, host: str, reuse: bool) -> socket.socket | None:
    """Return a socket bound to a free port, or None. Without `reuse` a port is not free if it has connections in
    TIME_WAIT, or if another socket is bound to it without listening."""
    out = socket.socket()
    out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        out.bind((host, port))
    except OSError as error:
        out.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise  # for example an address that is not of this host
        return None
    return out


def users_listening(port: int, *hosts: str) -> set[int]:
    """Return the ids of the users whose sockets listen at `port` on one of these addresses, or on all addresses.

    It takes a tenth of a millisecond. The result is empty if the kernel cannot report it.
    """
    found = set[int]()
    wanted = {"0.0.0.0", "::", *hosts}
    for family in (socket.AF_INET, socket.AF_INET6):
        body = struct.pack("=4BIHH", family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTEN, socket.htons(port), 0)
        body += struct.pack("=32xIII", 0, _NO_COOKIE, _NO_COOKIE)
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
                kernel.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _DUMP, 0, 0) + body)
                kind = 0
                while kind not in _END:
                    data = kernel.recv(1 << 16)
                    while data and kind not in _END:
                        length, kind = struct.unpack_from("=IH", data)
                        if kind == _BY_FAMILY:
                            source = ipaddress.ip_address(data[24:28] if family == socket.AF_INET else data[24:40])
                            if str(getattr(source, "ipv4_mapped", None) or source) in wanted:
                                found.add(struct.unpack_from("=I", data, 80)[0])
                        data = data[(length + 3) & ~3 :]
        except OSError:  # the kernel does not support this request
            pass
    return found


def choose_port(port: int | None, host: str, patience: float = 0.0) -> int:
    """Return `port` if it is free within `patience` seconds, else raise ConfigError; for None return a free port."""
    deadline = time.monotonic() + patience
    while port is not None and not port_is_free(port, host):
        if time.monotonic() > deadline:
            remedy = "name a free port, or remove the flag"
            raise ConfigError(f"port {port} is taken", where="--engine-port", remedy=remedy)
        time.sleep(0.05)
    return port or free_port(host)

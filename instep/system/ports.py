"""Free ports for the servers of a run, and who listens at a port."""

from __future__ import annotations

import collections
import errno
import ipaddress
import secrets
import socket
import struct
import sys
import time

from instep.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)  # below the ephemeral ports of connections, above Ray's workers
TRIES = 1000
_SOCK_DIAG, _BY_FAMILY, _DUMP, _LISTEN = 4, 20, 0x301, 10  # see sock_diag(7)
_END, _NO_COOKIE = (2, 3), 0xFFFFFFFF  # NLMSG_ERROR and NLMSG_DONE; INET_DIAG_NOCOOKIE
_KEPT = 256
_given: collections.deque[tuple[int, socket.socket | None]] = collections.deque()  # the last ones, not given again


def check_loopback() -> int:
    """Connect to a server of our own on loopback, as engines and ranks are reached; returns the port that was tried.

    Raises:
        ConfigError: this host lets nothing through there.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                server.settimeout(5)
                server.accept()[0].close()
                return int(client.getpeername()[1])
    except OSError as error:
        raise ConfigError(
            f"no connection over {LOOPBACK}: {error.strerror or error}",
            where="this host",
            remedy="engines and ranks are reached there: allow it (a sandbox, a firewall, `ip link set lo up`)",
        ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; see `free_ports`."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` consecutive ports that were free a moment ago; 0 if `count` is 0.

    No outgoing connection of this host gets them before the server listens, which takes vLLM seconds, and no other
    process that asks here, while this one lives (and has not been given 256 more).

    Raises:
        ConfigError: none were found after many tries.
    """
    if not count:
        return 0
    for _ in range(TRIES):
        first = PORTS.start + secrets.randbelow(len(PORTS) - count + 1)
        ports = range(first, first + count)
        if all(_can_bind(port, host, reuse=False) for port in ports) and _reserve(ports):
            return first
    raise ConfigError(
        f"found no {count} free ports in a row from {PORTS.start} to {PORTS.stop - 1}",
        where=host,
        remedy="end what listens there, or name ports with --engine-port",
    )


def _reserve(ports: range) -> bool:
    """Whether no process of this host was given one of them; if so, no other one is given them now.

    A name of Linux's abstract sockets stands for a port: it has one owner, and ends with it.
    """
    if {port for port, _ in list(_given)}.intersection(ports):
        return False
    names: list[socket.socket | None] = []  # None: this system has no such names
    for port in ports:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if sys.platform == "linux" else None
        names.append(name)
        try:
            if name is not None:
                name.bind(f"\0instep-port-{port}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for other in filter(None, names):
                    other.close()
                return False
    _given.extend(zip(ports, names, strict=True))
    while len(_given) > _KEPT:
        _, oldest = _given.popleft()
        if oldest is not None:
            oldest.close()
    return True


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


def users_listening(port: int, *hosts: str) -> set[int]:
    """The ids of the users whose sockets listen at `port` of one of these addresses, or of all addresses.

    It costs a tenth of a millisecond. Nothing is found where the kernel does not tell (not Linux).
    """
    found = set[int]()
    wanted = {"0.0.0.0", "::", *hosts}
    for family in (socket.AF_INET, socket.AF_INET6) if sys.platform == "linux" else ():
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
        except OSError:  # no such question here
            pass
    return found


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

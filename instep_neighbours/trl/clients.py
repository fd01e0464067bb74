"""The trainers at the server's port: who has the weight group, and whether it lives."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from instep.errors import SyncError

GONE_SECONDS = 10.0  # without a connection of the trainer, while its tensors are waited for
# A host that has vanished answers no probe: its connections end after 4 + 3 * 2 s.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Refused(Exception):
    """A request that is answered with an HTTP error; the message says what happened and what to do."""

    def __init__(self, message: str, status: int = 409):
        super().__init__(message)
        self.status = status


class BadRequest(Refused):
    """A request that no engine is asked for; the message says what is wrong."""

    def __init__(self, message: str):
        super().__init__(message, 400)


class Connection:
    """The TCP connection that a request came by. A client that has one open lives."""

    def __init__(self, transport: asyncio.Transport | None):
        self._transport = transport
        if transport is not None and (sock := transport.get_extra_info("socket")) is not None:
            _probe(sock)
        peer = transport.get_extra_info("peername") if transport is not None else None
        self.host = str(peer[0]) if peer else "?"
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "?"

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Connection) and self._transport is other._transport

    __hash__ = None  # type: ignore[assignment]


def _probe(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False)
class Client:
    """The trainer that has the weight group.

    Attributes:
        connections: by which its requests came.
        failed: its update has failed, and the group with it; fault: why, until it was told.
        given_up: nothing of it is waited for any more.
        left: whether it has no connection open, and since when, as far as somebody looked.
    """

    legacy: bool
    connections: list[Connection]
    fault: str = ""
    failed: bool = False
    given_up: bool = False
    left: float | None = None
    packed_bytes: int | None = None
    since: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))

    @property
    def peer(self) -> str:
        return self.connections[0].peer

    def has(self, connection: Connection) -> bool:
        """Whether a request is this client's, as far as one can tell: by its connection, or its host."""
        return connection in self.connections or connection.host == self.connections[0].host

    @property
    def connected(self) -> bool:
        self.connections = [c for c in self.connections if c.open] or self.connections[:1]
        return any(c.open for c in self.connections)

    def seen(self, connection: Connection) -> None:
        if connection not in self.connections:
            self.connections.append(connection)

    def check(self) -> None:
        """Raise SyncError if it will send nothing any more. For calls again and again while it is waited for."""
        now = time.monotonic()
        self.left = None if self.connected else self.left or now
        if self.given_up or (self.left is not None and now - self.left > GONE_SECONDS):
            raise SyncError(
                f"the trainer at {self.peer} has gone in the middle of an update",
                where="the weight group",
                remedy="the engines keep their weights; start the trainer again",
            )

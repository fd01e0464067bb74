"""Requests at the server's port: their errors, their connections, and the trainer behind them."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instep.errors import InstepError, SyncError

if TYPE_CHECKING:
    from aiohttp import web

Body = dict[str, Any]
GONE_SECONDS = 10.0  # without a connection of the trainer, while the server waits for its tensors
# A host that has disappeared answers no probe: its connections end after 4 + 3 * 2 s.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Refused(Exception):
    """A request that is answered with an HTTP error; the message says what happened and what to do."""

    def __init__(self, message: str, status: int = 409):
        super().__init__(message)
        self.status = status


class BadRequest(Refused):
    """A request that is refused before an engine gets it; the message says what is wrong."""

    def __init__(self, message: str):
        super().__init__(message, 400)


def one_line(error: Exception) -> str:
    """Return an error as one line."""
    if not isinstance(error, InstepError):
        return str(error)
    where, remedy = f" ({error.where})" if error.where else "", f"; {error.remedy}" if error.remedy else ""
    return f"{error.what}{where}{remedy}"


def of_type(body: Body, name: str, kind: type, *default: Any) -> Any:
    """Return the field `name` of a request. Raises BadRequest if it is missing without a default, or has a wrong
    type."""
    value = body.get(name, *default)
    if type(value) is not kind and (value, *default) != (None, None):
        what = {int: "a whole number", str: "a text", dict: "an object", list: "a list"}[kind]
        raise BadRequest(f"{name} must be {what}, got {value!r:.60}")
    return value


@dataclass(frozen=True)
class Connection:
    """The TCP connection of a request. A client with an open connection is alive."""

    transport: asyncio.Transport

    def __post_init__(self) -> None:
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @classmethod
    def of(cls, http: web.Request) -> Connection:
        assert http.transport is not None  # otherwise its handler is cancelled
        return cls(http.transport)

    @property
    def host(self) -> str:
        return self.peer.rpartition(":")[0]

    @property
    def peer(self) -> str:
        return "{}:{}".format(*self.transport.get_extra_info("peername"))

    @property
    def open(self) -> bool:
        return not self.transport.is_closing()


@dataclass(eq=False)
class Client:
    """The trainer that has the weight group.

    Attributes:
        legacy: of TRL <= 1.10.
        connections: those of its requests, the last one at least.
        packed_bytes: of the buffers that it sends by default; None: tensors come one by one.
        given_up: the server does not wait for it any more.
        left: since when it has no open connection, as far as `check` has seen.
    """

    legacy: bool
    connections: list[Connection]
    packed_bytes: int | None = None
    given_up: bool = False
    left: float | None = None
    since: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))

    @property
    def peer(self) -> str:
        return self.connections[0].peer

    @property
    def host(self) -> str:
        """Its host; requests from it count as this client's."""
        return self.connections[0].host

    @property
    def connected(self) -> bool:
        self.connections = [c for c in self.connections if c.open] or self.connections[:1]
        return self.connections[0].open

    def check(self) -> None:
        """Raise SyncError if it cannot send any more. Called repeatedly during the wait for its tensors."""
        now = time.monotonic()
        self.left = None if self.connected else self.left or now
        if self.given_up or (self.left is not None and now - self.left > GONE_SECONDS):
            raise SyncError(
                f"the trainer at {self.peer} has disconnected during an update",
                where="the weight group",
                remedy="the engines keep their weights; start the trainer again",
            )

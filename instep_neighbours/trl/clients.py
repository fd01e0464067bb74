"""Requests at the server's port: their keys, errors and connections, and the trainer behind them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from instep.errors import InstepError, SyncError
from instep_engine.guard import EVERYONE, GENERATION_ROUTES

Body = dict[str, Any]
GONE_SECONDS = 10.0  # without a connection of the trainer, while the server waits for its tensors
# A host that has disappeared answers no probe: its connections end after 4 + 3 * 2 s.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


OPEN = frozenset({"/health", "/health/"})
# Routes without effect on weights: keys for generation open them, too.
READING = GENERATION_ROUTES | frozenset(
    "/get_world_size/ /generate/ /chat/ /get_sequence_logprobs/ /get_world_size /server_info /is_paused /weight_info "
    "/v1/chat/completions/render".split()
)


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
class Access:
    """Which keys open which routes of the front; `instep_engine/guard.py` is for engines.

    Attributes:
        key: opens every route; "": all are open.
        generate_key: opens `READING`, too; `EVERYONE`: they are open; "": there is no such key.
        key_file: where the user finds `key`.
    """

    key: str
    generate_key: str = ""
    key_file: str = ""

    def refusal(self, path: str, header: str) -> tuple[int, str] | None:
        """Return status and message of a refused request with this Authorization header; None for an accepted one."""
        reads = path in READING
        if path in OPEN or not self.key or (reads and self.generate_key == EVERYONE) or sends(header, self.key):
            return None
        if self.generate_key not in ("", EVERYONE) and sends(header, self.generate_key):
            told = f"this key opens generation only, not {path}, which needs the key in {self.key_file}"
            return None if reads else (403, told)
        how = "send 'Authorization: Bearer KEY', or name the server http://user:KEY@HOST:PORT (vllm_server_base_url)"
        which = f"the key in {self.key_file}" if self.key_file and not reads else "the server's key"
        return 401, f"{path} needs {which}: {how}"


def sends(header: str, key: str) -> bool:
    """Return whether the header has the key: as a bearer token, or as the password of http://user:KEY@HOST."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode(errors="replace").partition(":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())


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

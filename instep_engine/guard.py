"""Which requests a server accepts from which clients.

A server finds two keys in its environment. The key in `KEY_VARIABLE` opens every route. The key in `GENERATE_VARIABLE`
opens only `GENERATION_ROUTES`; if it is `EVERYONE`, they need no key. `OPEN_ROUTES` never need a key. Two kinds of
requests are always refused: those from a web page of another host (its Origin), and those to a foreign name (its Host).
The names in `HOSTS_VARIABLE`, separated by commas, are not foreign.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from instep_engine.asgi import App, Message, Receive, Send, reply

KEY_VARIABLE = "INSTEP_API_KEY"
GENERATE_VARIABLE = "INSTEP_GENERATE_KEY"
HOSTS_VARIABLE = "INSTEP_ALLOWED_HOSTS"
LONGEST_KEY = 1000  # characters: servers limit the size of a header
EVERYONE = "*"
OPEN_ROUTES = frozenset({"/health"})
ATROPOS_ROUTES = frozenset(  # they report the state of Atropos' server, which not every server of ours has
    "/health_generate /bridge/info /bridge/state_dict_info /bridge/is_paused /bridge/is_sleeping "
    "/bridge/list_endpoints /lora/status".split()
)
GENERATION_ROUTES = ATROPOS_ROUTES | frozenset(
    "/inference/v1/generate /generate /v1/models /v1/completions /v1/chat/completions /v1/responses /v1/messages "
    "/v1/embeddings /tokenize /detokenize".split()
)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname().lower()})


class Guard:
    """The check of every request to one server.

    Args:
        key: opens every route; generate_key: also opens generation ("": no such key).
        hosts: more names and addresses by which clients may call this server.

    Raises:
        ValueError: there is no key, or a request could not carry it.
    """

    def __init__(self, key: str, generate_key: str = "", hosts: Iterable[str] = ()):
        if not key:
            raise ValueError(f"no key: set the variable {KEY_VARIABLE}, which control routes need")
        for given in (key, *([generate_key] if generate_key not in ("", EVERYONE) else [])):
            if fault := fault_of_key(given):
                raise ValueError(f"the key {fault}: change the variable {KEY_VARIABLE}")
        self._key, self._generate_key = key.encode(), generate_key.encode()
        self._everyone = generate_key == EVERYONE
        self._hosts = _LOCAL_NAMES | {host.strip().lower().strip("[]") for host in hosts if host.strip()}

    @classmethod
    def from_environment(cls) -> Guard:
        key, generate_key, hosts = (os.environ.get(v, "") for v in (KEY_VARIABLE, GENERATE_VARIABLE, HOSTS_VARIABLE))
        return cls(key, generate_key, hosts.split(","))

    def refusal(self, path: str, headers: Mapping[str, str], address: str) -> tuple[int, str] | None:
        """Return HTTP status and message of a refused request; None for one that may pass.

        Args:
            headers: by names in lower case, or by names of any case.
            address: the address of this host that received the request.
        """
        for name, prefix in (("host", "//"), ("origin", "")):
            value = headers.get(name)
            if value is not None and (host := _host(prefix + value)) != address and host not in self._hosts:
                remedy = f"--allowed-hosts (or {HOSTS_VARIABLE} in the server's environment) names hosts that are not"
                return 403, f"{name.capitalize()}: {value!r} is foreign to this server; {remedy}"
        if path in OPEN_ROUTES:
            return None
        generates = path in GENERATION_ROUTES
        if generates and self._everyone:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(sent, self._key):
            return None
        if self._generate_key and hmac.compare_digest(sent, self._generate_key):
            return None if generates else (403, f"this key opens generation only, not {path}")
        how = "a hook gets KEY from instep.rollout.http.api_key(url); docs/security.md lists its other places"
        return 401, f"{path} needs a key: send the header 'Authorization: Bearer KEY' ({how})"


class Guarded:
    """The ASGI middleware of an engine's server. A subclass may serve routes of its own (`serve`).

    Raises:
        ValueError: the environment holds no key.
    """

    def __init__(self, app: App):
        self.app, self.guard = app, Guard.from_environment()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] != "lifespan":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self.guard.refusal(scope["path"], headers, (scope.get("server") or ("",))[0])
        if refusal is None:
            await self.serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            kind = "Unauthorized" if refusal[0] == 401 else "Forbidden"
            await reply(send, refusal[0], {"error": {"message": refusal[1], "type": kind, "code": refusal[0]}})

    async def serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer an accepted request."""
        await self.app(scope, receive, send)


def fault_of_key(key: str) -> str:
    """Return what is wrong with a key; "" if a header can carry it, and it does not mean everyone."""
    if not key or key == EVERYONE or not key.isascii() or not key.isprintable() or " " in key:
        return "is not one line of ASCII without blanks"
    return f"has more than {LONGEST_KEY} characters" if len(key) > LONGEST_KEY else ""


def _host(url: str) -> str | None:
    """Return the host of a URL, in lower case; None without one."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None

"""Who may ask a server for what. This file stands in instep and, word for word, in its plugin for vLLM.

A server finds two keys in its environment. That of `KEY_VARIABLE` opens every route. That of `GENERATE_VARIABLE` opens
`GENERATION_ROUTES`, too; if it is `EVERYONE`, they need no key. `OPEN_ROUTES` never need one. A request that a web page
of another host has sent (its Origin), or that came by a foreign name (its Host), is refused whatever its key is.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

KEY_VARIABLE = "INSTEP_API_KEY"
GENERATE_VARIABLE = "INSTEP_GENERATE_KEY"
EVERYONE = "*"
OPEN_ROUTES = frozenset({"/health"})
GENERATION_ROUTES = frozenset(
    "/inference/v1/generate /v1/models /v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/embeddings "
    "/tokenize /detokenize".split()
)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname().lower()})


class Guard:
    """The check of every request to one server.

    Args:
        key: opens every route; generate_key: opens generation, too ("": no further key does).

    Raises:
        ValueError: there is no key.
    """

    def __init__(self, key: str, generate_key: str = ""):
        if not key:
            raise ValueError(f"no key: set the variable {KEY_VARIABLE}, which control routes ask for")
        self._key, self._generate_key = key.encode(), generate_key.encode()
        self._everyone = generate_key == EVERYONE

    @classmethod
    def from_environment(cls) -> Guard:
        return cls(os.environ.get(KEY_VARIABLE, ""), os.environ.get(GENERATE_VARIABLE, ""))

    def refusal(self, path: str, headers: Mapping[str, str], address: str) -> tuple[int, str] | None:
        """HTTP status and message of a refused request; None for one that may pass.

        Args:
            headers: by names in lower case, or by names of any case.
            address: of this host, at which the request came in.
        """
        for name, prefix in (("host", "//"), ("origin", "")):
            value = headers.get(name)
            if value is not None and not _is_local(prefix + value, address):
                return 403, f"{name.capitalize()}: {value!r} is foreign: this server answers programs of its own user"
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
        return 401, f"{path} needs a key: send the header 'Authorization: Bearer KEY'"


def _is_local(url: str, address: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return host is not None and (host in _LOCAL_NAMES or host == address)

"""HTTP to engines and routers, with their keys. It bypasses proxies of the environment: both have plain addresses."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from instep.engines.keys import api_key, check_listener, headers_for, key_of
from instep.errors import ConfigError, EngineError

REFUSED = (401, 403)
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def checked_socket(info: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an aiohttp connector's server connection. Raises ConnectionError, as `check_listener`."""
    family, kind, protocol, _, address = info
    check_listener(address[0], address[1])
    return socket.socket(family, kind, protocol)


def check_server(name: str, url: str) -> None:
    """Raise EngineError if another user of this host listens at the port of a server that this run has just started.

    Args:
        name: the server's name in the error.
    """
    try:
        api_key(url)
    except ConnectionError as error:
        remedy = "end that program, or start again: the run then uses another port unless a flag sets it"
        raise EngineError(f"{name} has lost its port: {error.strerror}", where=url, remedy=remedy) from None


def open_directly(request: str | urllib.request.Request, *, timeout: float) -> Any:
    """Open a URL as urllib does, with the key of its address. Do not follow a redirection."""
    request = urllib.request.Request(request) if isinstance(request, str) else request
    for name, value in headers_for(request.full_url).items():
        request.add_unredirected_header(name, value)
    return _open(request, timeout=timeout)


def open_without_key(url: str, *, timeout: float) -> Any:
    """Open a URL that asks for no key, without a key."""
    return _open(url, timeout=timeout)


def get_json(url: str, timeout: float) -> Any:
    """GET `url` and return its JSON.

    Raises:
        OSError: no answer in `timeout` seconds, or an error (urllib.error.HTTPError).
        ValueError: the answer is not JSON.
        ConfigError: it asks for a key, or for another one.
    """
    with _explained(url), open_directly(url, timeout=timeout) as answer:
        return json.loads(answer.read())


def check_open(url: str, *, timeout: float) -> None:
    """Ask, without a key, a URL that needs none. Raises ConfigError: it refuses (401 or 403)."""
    with suppress(OSError, http.client.HTTPException), _explained(url):
        open_without_key(url, timeout=timeout).close()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code in REFUSED:
            raise refusal(url, error.code, error.read().decode(errors="replace")) from None
        raise


def refusal(url: str, status: int, text: str) -> ConfigError:
    """Return the error for a server that has refused a request for its key (401), its Host or its Origin (403).

    Args:
        text: the body of the answer.
    """
    if status == 403:
        what = f"it refuses to serve us: {message(text)}"
        remedy = "use a direct address of it, or start it with INSTEP_ALLOWED_HOSTS=NAME in its environment"
        return ConfigError(what, where=url, remedy=f"{remedy} (docs/security.md)")
    what = "it does not accept the key that was sent" if key_of(url) else "it asks for a key, and none was sent"
    remedy = "--api-key-file FILE (or the variable INSTEP_API_KEY) sets the key of servers that another user runs"
    return ConfigError(what, where=url, remedy=remedy)


def message(body: str) -> str:
    """Return the message in an error answer of vLLM or FastAPI, else the beginning of the answer."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        return str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return body[:500]

"""Keys: of this run's own servers, and of external ones. No command line contains them.

A run makes its key itself. Its engines, routers and gates find it in their environment (`guard.py`), which other users
of the host cannot read. This also holds on other hosts, where it comes as an argument of an actor's method. Every
request of instep itself gets the key of its address. No other address gets a key. The address of our own server gets
none either if another user of this host listens there, because that user took the port first.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import stat
from pathlib import Path
from urllib.parse import urlsplit

from instep.arguments.settings import EngineSettings, Settings
from instep.errors import ConfigError, writing
from instep.system.ports import LOOPBACK, users_listening
from instep.system.run_context import PerRun, cached_per_run
from instep_engine.guard import EVERYONE, GENERATE_VARIABLE, HOSTS_VARIABLE, KEY_VARIABLE, LONGEST_KEY, fault_of_key

KEY_FILE = "api_key"  # in the run's folder
CONTROL_FILE = "control_key"  # also in the run's folder, of `instep serve`: opens control routes, too
_MAKE = "python -c 'import secrets; print(secrets.token_hex(32))'"
# By address of a server: its key and, for a server of this run on this host, the user that runs it.
_known: PerRun[dict[tuple[str, int], tuple[str, int | None]]] = PerRun(dict)
_STRANGER = "", None


@cached_per_run
def _made(purpose: str) -> str:
    return secrets.token_hex(32)  # does not begin with "-", so that it can be the value of any program's flag


def run_key() -> str:
    """Return the key of the engines, routers and gates that this run starts. It opens all of their routes."""
    return _made("run")


def given_key(args: EngineSettings) -> str:
    """Return the key in `--api-key-file`, else that of the variable; "" without either.

    Raises:
        ConfigError: the file cannot be read, other users can read it, or file or variable hold no key.
    """
    if args.api_key_file is not None:
        return _read(args.api_key_file)
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return _checked(key, f"the variable {KEY_VARIABLE}", f'{KEY_VARIABLE}="$({_MAKE})", or unset it') if key else ""


def client_key(args: EngineSettings) -> str:
    """Return the key that opens generation for clients of this run: users of `instep serve`, and hooks.

    An external router sees it, so there it is not the run's key.
    """
    if args.command == "serve" or args.vllm_router_ip is not None:
        return given_key(args) or _made("clients")
    return run_key()


def router_key(args: Settings, ours: bool) -> str:
    """Return the key of a router that this run starts. The router passes it on to its engines.

    Args:
        ours: whether the engines are ours. External engines get their own key, or one that opens only the router.
    """
    return run_key() if ours else given_key(args) or _made("router")


def server_environment(args: EngineSettings) -> dict[str, str]:
    """Return the environment variables that make a server of this run ask for keys."""
    hosts = ",".join(args.allowed_hosts or ()) or os.environ.get(HOSTS_VARIABLE, "")
    generate = EVERYONE if args.no_api_key else client_key(args)
    return {KEY_VARIABLE: run_key(), GENERATE_VARIABLE: generate, HOSTS_VARIABLE: hosts}


def know(url: str, key: str, *, user: int | None = None) -> None:
    """Send `key` with every request to the host and port of `url` from now on; "" sends no key.

    Args:
        user: the user that runs the server, if it belongs to this run and is on this host. No other user's server gets
            the key.
    """
    _known()[_address(url)] = key, user


def user_at(url: str) -> int | None:
    """Return the `user` that `know` got for the server."""
    return _known().get(_address(url), _STRANGER)[1]


def key_of(url: str) -> str:
    """Return the key that requests to `url` need, as far as this run knows; "" if it knows none."""
    return _known().get(_address(url), _STRANGER)[0]


def api_key(url: str) -> str:
    """Return `key_of(url)` for a request that is sent now. Raises ConnectionError, as `check_listener`."""
    check_listener(*_address(url))
    return key_of(url)


def bearer(key: str) -> dict[str, str]:
    """Return the headers with `key`; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def headers_for(url: str) -> dict[str, str]:
    """Return the headers with `api_key(url)`; empty without a key."""
    return bearer(api_key(url))


def check_listener(host: str, port: int) -> None:
    """Raise ConnectionError if another user of this host listens at the port of a server of this run."""
    host = _name(host)
    _, user = _known().get((host, port), _STRANGER)
    if user is not None and (strangers := users_listening(port, host, "::1") - {user}):
        what = f"user {min(strangers)} of this host listens at {host}:{port}, where a server of this run should"
        raise ConnectionRefusedError(errno.ECONNREFUSED, what)


def _address(url: str) -> tuple[str, int]:
    """Return host and port of a URL."""
    parts = urlsplit(url)
    return _name(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)


def _name(host: str) -> str:
    """Return 127.0.0.1 for any name of loopback that a hook uses: our own servers listen there."""
    return LOOPBACK if host in ("localhost", "::1") else host


def write(folder: Path, key: str, name: str = KEY_FILE) -> Path:
    """Write `key` into a new file in `folder` that only this user can read. Return its path."""
    path = folder / name
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
    return path


@functools.cache  # it may be a pipe, which can be read only once
def _read(path: str) -> str:
    where = f"--api-key-file {path}"
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(10 * LONGEST_KEY).strip()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where, remedy="name a file with one key") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError("other users can read this key", where=where, remedy=f"chmod 600 {path}")
    return _checked(key, where, f"{_MAKE} > {path}")


def _checked(key: str, where: str, remedy: str) -> str:
    if fault := fault_of_key(key):
        raise ConfigError(f"holds no key: what is there {fault}", where=where, remedy=remedy)
    return key

"""Where a run logs. What Trackio needs is checked here, before the run moves the files of an earlier one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from instep.arguments.concern import Given, Problem, Settings
from instep.arguments.flag import read_flags

LOGGERS = read_flags(__file__)
TOKEN, SERVER = "TRACKIO_WRITE_TOKEN", "TRACKIO_SERVER_URL"


def trackio_server_url(args: Settings, given: Given) -> str | None:
    """Return the URL of Trackio's server: the flag, else the variable that Trackio reads."""
    return args.trackio_server_url or (os.environ.get(SERVER) or None if args.use_trackio else None)


RESOLVERS = (trackio_server_url,)


def trackio(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that the package is here, and that the URL of a server has a scheme and a token to write with."""
    if not args.use_trackio:
        return
    if find_spec("trackio") is None:
        yield Problem("trackio is not installed", "--use-trackio", "instep install trackio, or remove the flag")
    url, where = args.trackio_server_url, "--trackio-server-url" if "trackio_server_url" in given else SERVER
    if url and not url.startswith(("http://", "https://")):
        yield Problem(f"'{url}' is not a URL", where, "give one that begins with http:// or https://")
    elif url and "write_token=" not in url and not os.environ.get(TOKEN):
        remedy = f"add ?write_token=..., which `trackio show` prints, or set {TOKEN}"
        yield Problem("the server wants a token to write", where, remedy)


RULES = (trackio,)

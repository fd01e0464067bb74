"""The request gate as its owner sees it: a port for clients that must not use all routes of the server behind it.

`instep serve` puts one before each model. A run with `--no-api-key` puts one before its own router, which asks for a
key on all of its routes or on none. The process is `gate_main.py`.
"""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from instep.arguments.settings import EngineSettings
from instep.engines.http import check_server
from instep.engines.router import Server
from instep.errors import EngineError
from instep.system.processes import SupervisedProcess


def needs_gate(args: EngineSettings, has_router: bool) -> bool:
    """Return whether clients of a model get a gate. An external router has none: it belongs to the clients."""
    return args.vllm_router_ip is None and (args.command == "serve" or (args.no_api_key and has_router))


class Gate(Server):
    """A running gate. It listens at `url`."""

    title = "the gate"

    def __init__(self, url: str, process: SupervisedProcess):
        self.url, self.process = url, process

    def wait_ready(self, timeout: float) -> None:
        """Wait until it listens. Raises EngineError: its process ends, or `timeout` seconds are over."""
        deadline, at = time.monotonic() + timeout, urlsplit(self.url)
        while True:
            self.check_alive()
            try:
                socket.create_connection((str(at.hostname), int(at.port or 0)), timeout=1.0).close()
                return check_server(self.title, self.url)
            except OSError:
                if time.monotonic() > deadline:
                    where = self.process.describe() if self.process is not None else self.url
                    raise EngineError("the gate does not listen", where=where, remedy="see its log") from None
            time.sleep(0.05)

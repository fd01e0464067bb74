"""A gate as its owner sees it: the port that clients get where what stands behind it has routes that they must not use.

`instep serve` puts one before each model, and so does a run with `--no-api-key` before a router of its own, which asks
for a key on all of its routes or on none. The process is `gate_main.py`.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from instep.engines.http import check_server
from instep.engines.router import Server
from instep.errors import EngineError
from instep.system.processes import SupervisedProcess

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def needs_gate(args: Settings, has_router: bool) -> bool:
    """Whether clients of a model get a gate; not before an external router, which is theirs."""
    return args.vllm_router_ip is None and (args.command == "serve" or (args.no_api_key and has_router))


class Gate(Server):
    """A running gate, which listens at `url`."""

    title = "the gate"

    def __init__(self, url: str, process: SupervisedProcess):
        self.url, self.process = url, process

    def wait_ready(self, timeout: float) -> None:
        """Wait until it listens. Raises EngineError if its process ends, or after `timeout` seconds."""
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

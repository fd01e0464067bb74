"""What the processes of a run listen on, and what a stranger on the same host gets there."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from instep.engines import keys

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
CONTROL = (
    "POST /pause?mode=abort",
    "POST /update_weights",
    "POST /start_weight_update",
    "POST /collective_rpc",
    "POST /abort_requests",
    "POST /sleep",
    "POST /v1/load_lora_adapter",
    "POST /add_worker?url=http://127.0.0.1:1",
    "POST /workers",
    "GET /list_workers",
    "GET /is_paused",
    "GET /server_info",
)
GENERATION = ("POST /inference/v1/generate", "POST /v1/completions", "GET /v1/models")
PAGE = {"Origin": "https://evil.example", "Content-Type": "text/plain"}  # what a page sends without asking first


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket (`address` and `port`) or Unix socket (`path`; "@" begins an abstract one)."""

    program: str
    address: str = ""
    port: int = 0
    path: str = ""

    def ask(self, route: str, timeout: float = 3.0, **headers: str) -> int | None:
        """The HTTP status that answers a request without a key; None if this is no HTTP server."""
        method, path = route.split()
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        try:
            connection.request(method, path, "{}" if method == "POST" else None, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def open_to_others(self) -> bool:
        """Whether another user can connect to this Unix socket: everybody may write it and search its folders."""
        if self.path.startswith("@"):
            return True
        path = Path(self.path)
        return bool(path.stat().st_mode & stat.S_IWOTH) and all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)


async def telling_reward(args: Any, sample: Any, **_: Any) -> float:
    """Writes the key of the run's engines into the file KEY_TOLD, which is outside of the run; a step takes a while."""
    await asyncio.sleep(0.5)
    Path(os.environ["KEY_TOLD"]).write_text(keys.run_key())
    return 0.0


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """All of them, of these processes and their threads."""
    unix = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if (
            int(fields[3], 16) & 0x10000 and len(fields) > 7
        ):  # __SO_ACCEPTCON: it listens; without a path nobody finds it
            unix[fields[6]] = fields[7]
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            program = " ".join(process.cmdline())[:200]
            for c in process.net_connections("tcp"):
                if c.status == psutil.CONN_LISTEN:
                    found.append(Listener(program, c.laddr.ip, c.laddr.port))
            for fd in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(f"/proc/{process.pid}/fd/{fd}")
                    if name.startswith("socket:[") and (path := unix.get(name[8:-1])) is not None:
                        found.append(Listener(program, path=path))
    return found

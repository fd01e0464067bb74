"""The actor on each node of a Ray cluster, which owns the worker and engine processes of that node.

Every rank and engine is a supervised subprocess of the actor, as on the `local` cluster. So exit signals and logs are
exact. When the controller dies, Ray ends the actor, and the actor's death ends its processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from instep.cluster.local import Inbox, start_rank
from instep.errors import ConfigError
from instep.system.ports import choose_port, free_port, free_ports
from instep.system.private import private_files
from instep.system.processes import SupervisedProcess, num_usable_cpus

WATCH_SECONDS = 0.2  # between two checks of the processes


@dataclass(frozen=True)
class HostInfo:
    """A node as its actor sees it; `gpus` are the ids from Ray, in order; `user` is the id of the actor's user."""

    node_id: str
    address: str
    num_cpus: int
    gpus: tuple[str, ...]
    user: int


@dataclass(frozen=True)
class Fault:
    """The fault of a process, as `SupervisedProcess` reports it; a dead process reports nothing more."""

    what: str
    text: str
    remedy: str
    dead: bool


class _Child:
    def __init__(self, process: SupervisedProcess, connection: Connection | None = None):
        self.process, self.connection = process, connection
        self.dead = False  # at the last check
        self._reported = False

    def fault(self) -> Fault | None:
        """Return the fault of the process; report the fault of a living process only once."""
        what, dead = self.process.fault(), not self.process.alive()
        if what is None or (self._reported and not dead):
            return None
        self._reported = True
        return Fault(what, self.process.describe(), self.process.remedy(), dead)


class Host:
    """The actor. Ray calls its methods from several threads.

    Args:
        folder: the controller's working directory. It must exist on this node, too: relative paths start there.
    """

    def __init__(self, folder: str):
        self._private = contextlib.ExitStack()  # open as long as the actor lives
        self._private.enter_context(private_files())
        self._children: dict[str, _Child] = {}
        self._lock = threading.Lock()
        self._folder = folder
        self._inbox = Inbox()
        self._listeners: list[socket.socket] = []

    def info(self) -> HostInfo:
        """Return the facts about this node. Raise ConfigError if the working directory does not exist on it."""
        import ray

        try:
            os.chdir(self._folder)
        except OSError as error:
            raise ConfigError(
                f"the folder {self._folder} is not on host {socket.gethostname()}: {error.strerror}",
                where="--cluster ray",
                remedy="start from a folder that all hosts of the cluster share",
            ) from None
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in sorted(context.get_accelerator_ids().get("GPU", ())))
        self._address = ray.util.get_node_ip_address()
        return HostInfo(context.get_node_id(), self._address, num_usable_cpus(), gpus, os.geteuid())

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    # ---- starting ------------------------------------------------------------------------------------------------

    def open_rendezvous(self) -> tuple[str, int]:
        """Open the socket where ranks meet, only on this node's address; return its URL and its descriptor."""
        listener = socket.socket()
        listener.bind((self._address, 0))
        listener.listen(4096)
        self._listeners.append(listener)
        return f"tcp://{self._address}:{listener.getsockname()[1]}", listener.fileno()

    def start_worker(self, name: str, log: str, env: Mapping[str, str], heartbeat: float, fds: Sequence[int]) -> int:
        """Start a rank and return its pid; `fds` are descriptors that it takes over."""
        process, connection = start_rank(name, Path(log), self._with_interface(env), heartbeat, fds)
        with self._lock:
            self._children[name] = _Child(process, connection)
        self._inbox.read(name, connection)
        for listener in self._listeners if fds else ():
            listener.close()  # the rank owns it now
        return process.pid

    def choose_ports(
        self, port: int | None, host: str, patience: float, num_side_channel_ports: int
    ) -> tuple[int, int, int, int]:
        """Return the ports of an engine whose first node is this one: for its server on `host`
        (`ports.choose_port`), for the meeting of its ranks and of its replicas, and the first side channel. Raise
        ConfigError if one is taken."""
        chosen = choose_port(port, host, patience)
        mine = self._address
        return chosen, free_port(mine), free_port(mine), free_ports(num_side_channel_ports, mine)

    def start_engine(self, name: str, log: str, words: Sequence[str], env: Mapping[str, str], heartbeat: float) -> int:
        """Start an engine's process on this node, Python with the arguments `words`, and return its pid."""
        if "VLLM_HOST_IP" in env:  # its processes on several nodes find each other
            env = self._with_interface(env)
        process = SupervisedProcess(name, [sys.executable, *words], Path(log), env, heartbeat=heartbeat)
        with self._lock:
            self._children[name] = _Child(process)
        return process.pid

    def _with_interface(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Return `env` with the only network interface for gloo: the one with this node's address."""
        if "GLOO_SOCKET_IFNAME" in env:
            return env
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == self._address for entry in addresses):
                return {**env, "GLOO_SOCKET_IFNAME": name}
        raise ConfigError(
            f"no network interface of {socket.gethostname()} has the address {self._address} that Ray uses for it",
            where="--cluster ray",
            remedy="start Ray with --node-ip-address, or set GLOO_SOCKET_IFNAME",
        )

    # ---- talking -------------------------------------------------------------------------------------------------

    def send(self, name: str, data: bytes) -> None:
        """Send one message to a worker; `receive` reports a dead worker."""
        connection = self._children[name].connection
        assert connection is not None
        with contextlib.suppress(OSError):
            connection.send_bytes(data)

    def receive(self, seconds: float) -> list[tuple[str, bytes | Fault]]:
        """Return process names with their new messages or faults; wait at most `seconds` for the first."""
        deadline = time.monotonic() + seconds
        out: list[tuple[str, bytes | Fault]] = []
        while not out and time.monotonic() < deadline:
            with self._lock:
                children = dict(self._children)
            message = self._inbox.next(WATCH_SECONDS)
            while message is not None:
                name, data = message
                if data is not None:
                    out.append((name, data))
                message = self._inbox.next(0)
            heard = {name for name, _ in out}
            for name, child in children.items():
                late, child.dead = child.dead, not child.process.alive()
                if child.dead and not late or name in heard:
                    continue  # its last messages come first, and may be on their way
                if (fault := child.fault()) is not None:
                    out.append((name, fault))
                    if fault.dead:
                        self._bury(name)
        return out

    def _bury(self, name: str) -> None:
        with self._lock:
            child = self._children.pop(name)
        child.process.kill()
        if child.connection is not None:
            child.connection.close()

    # ---- one process ---------------------------------------------------------------------------------------------

    def call_process(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of the `SupervisedProcess` with this name; return None if it is gone."""
        child = self._children.get(name)
        return getattr(child.process, method)(*args) if child is not None else None

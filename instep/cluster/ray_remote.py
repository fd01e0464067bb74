"""The controller's side of processes on the nodes of a Ray cluster; the other side is `ray_host.Host`.

A message travels as bytes through the actor of the worker's node:

    WorkerGroup -> RemoteProcess -> Host.send -> socket pair -> worker
    worker -> socket pair -> Host.receive -> a thread here -> the inbox of the WorkerGroup
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from instep.cluster.local import Inbox, WorkerGroup
from instep.cluster.ray_host import Fault, HostInfo
from instep.errors import InstepError, WorkerError
from instep.system.processes import Ending

POLL_SECONDS = 1.0
HOST_SECONDS = 60.0  # a node is lost if its actor is silent for this long; Ray notices most losses sooner


class RayWorkerGroup(WorkerGroup):
    """Workers on the nodes of a Ray cluster, with the calls, deadlines and errors of a local group."""

    def __init__(self, role: str, processes: Sequence[RemoteProcess]):
        self.role, self.watch, self._inbox = role, self.check_alive, Inbox()
        lines: list[Any] = list(processes)
        self.processes, self._connections = list(processes), lines
        for rank, process in enumerate(processes):
            process.deliver = partial(self._inbox.put, rank)


class RemoteProcess(Ending):
    """A `processes.Process` on another node, which reports its faults and death. It is also the controller's end of
    its connection: `deliver` gets its messages, and None at their end."""

    def __init__(self, host: HostHandle, name: str, log_path: Path):
        self.name, self.log_path, self._host = name, log_path, host
        self.pid = 0  # its pid on its node, once it is started
        self.reported: Fault | None = None
        self.deliver: Callable[[bytes | None], None] = lambda message: None

    def alive(self) -> bool:
        return self.reported is None or not self.reported.dead

    def fault(self) -> str | None:
        return self.reported.what if self.reported is not None else None

    def describe(self) -> str:
        if self.reported is not None:
            return self.reported.text
        return f"{self.name} is running; the end of {self.log_path}:\n{self.log_tail()}"

    def remedy(self) -> str:
        return self.reported.remedy if self.reported is not None else "see its log"

    def log_tail(self, num_lines: int = 15) -> str:
        if self.reported is not None and self.reported.dead:
            return self.reported.text
        return self._host.ask("call_process", self.name, "log_tail", num_lines) or ""

    def dump_stacks(self) -> None:
        self._tell("dump_stacks")

    def terminate(self) -> None:
        self._tell("terminate")

    def wait(self, seconds: float) -> None:
        if self.alive():
            with contextlib.suppress(WorkerError):  # its node is lost, and the process with it
                self._host.ask("call_process", self.name, "wait", seconds, timeout=seconds + 5)

    def kill(self) -> None:
        self._tell("kill")

    def send_bytes(self, message: memoryview) -> None:
        self._host.tell("send", self.name, bytes(message))

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""

    def take(self, fault: Fault) -> None:
        """Record a fault that its node reports; nothing follows its death."""
        if self.alive():
            self.reported = fault
            if fault.dead:
                self.deliver(None)

    def _tell(self, method: str) -> None:
        if self.alive():
            self._host.tell("call_process", self.name, method)


class HostHandle:
    """The controller's side of a node's actor, with a thread that forwards the node's reports."""

    def __init__(self, actor: Any, timeout: float):
        self._actor = actor
        self._processes: dict[str, RemoteProcess] = {}
        self._closed = False
        self.info: HostInfo = self.ask("info", timeout=timeout)
        self._thread = threading.Thread(target=self._pump, name=f"node {self.info.address}", daemon=True)
        self._thread.start()

    def start(self, method: str, name: str, log_path: Path, *args: Any) -> RemoteProcess:
        """Start a process there with a `method` of the actor that returns its pid."""
        process = self._processes[name] = RemoteProcess(self, name, log_path)  # first: it may report at once
        try:
            process.pid = self.ask(method, name, str(log_path), *args)
        except InstepError:
            process.kill()  # the actor may start it yet
            raise
        return process

    def ask(self, method: str, *args: Any, timeout: float = HOST_SECONDS) -> Any:
        """Call a method of the actor and wait for its result.

        Raises:
            InstepError: the error of the method, or a WorkerError that says why there is no answer.
        """
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error  # the error of the method
            if isinstance(cause, InstepError):
                raise cause from None
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            how = f" within {timeout:.0f} s" if late else f": {why(cause)}"
            remedy = "instep must be installed on every node, in the same version"
            if late:
                remedy = "its node is busy or cannot be reached: a start has --worker-start-timeout seconds, and Ray's "
                remedy += "actors have nice 15 unless RAY_worker_niceness=0 is set where `ray start` runs"
            raise WorkerError(
                f"a node's actor did not answer '{method}'{how}",
                where="Ray",
                remedy=f"{remedy}; `ray status` and the files in Ray's logs folder say more",
            ) from None

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the actor without waiting for it."""
        getattr(self._actor, method).remote(*args)

    def _pump(self) -> None:
        import ray

        while not self._closed:
            try:
                news = ray.get(self._actor.receive.remote(POLL_SECONDS), timeout=HOST_SECONDS)
            except Exception as error:  # noqa: BLE001 - a thread ends here: report it as the death of the processes
                for name, process in self._processes.items() if not self._closed else ():
                    text = f"{name} is lost with its node {self.info.address}: {why(error)}"
                    process.take(Fault("is lost", text, "see Ray's logs and its node", dead=True))
                return
            for name, item in news:
                process = self._processes[name]
                process.take(item) if isinstance(item, Fault) else process.deliver(item)

    def close(self) -> None:
        import ray

        self._closed = True
        ray.kill(self._actor)
        self._thread.join(5)


def why(error: Exception) -> str:
    """Return the beginning of the error text of Ray, on one line."""
    return " ".join(str(error).split())[:600] or type(error).__name__

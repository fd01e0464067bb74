"""The `local` cluster: one supervised subprocess per training rank, on one host, without Ray.

Controller and worker talk over a socket pair that no other process has. A request is `(method, args)`. Its answers are
any number of `("event", value)`, then one `("result", value)` or `("error", exception, traceback)`.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from instep.arguments.settings import ClusterSettings
from instep.errors import InstepError, RolloutError, WorkerError
from instep.system.endings import fault_of
from instep.system.processes import DETERMINISTIC_ENV, LOOK_SECONDS, OPENMP_ENV, Process, SupervisedProcess, stop_all
from instep.system.run_context import PerRun

if TYPE_CHECKING:
    import torch

CONNECTION_VARIABLE = "INSTEP_WORKER_FD"
WORKER = "instep.cluster.worker_main"
# Signs of a lack of memory in a traceback of torch or Python, on GPUs and CPUs.
OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MemoryError",
)
LESS_MEMORY = "lower --max-tokens-per-gpu or --micro-batch-size, or share GPUs with engines by turns only (--offload)"


def worker_env(args: ClusterSettings, num_threads: int) -> dict[str, str]:
    """Return the environment of a rank that uses `num_threads` cores."""
    env = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false", **OPENMP_ENV}
    return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})


class Joined(Protocol):
    """A rank of the actor on this host that another command starts."""

    def start(self, log_dir: Path, env: Mapping[str, str], heartbeat: float | None) -> tuple[Process, Connection]: ...


joined_ranks: PerRun[dict[int, Joined]] = PerRun(dict)  # by rank; the actor's group takes them


class Inbox:
    """The messages of several connections. It returns only whole messages: no caller waits for a sender that was
    stopped or killed in the middle of one. So each connection has its own thread."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, bytes | None]] = queue.SimpleQueue()

    def read(self, key: Any, connection: Connection) -> None:
        """Take the messages of `connection`, under the name `key`, until it ends."""
        threading.Thread(target=self._read, args=(key, connection), name=f"messages of {key}", daemon=True).start()

    def _read(self, key: Any, connection: Connection) -> None:
        try:
            while True:
                self.put(key, connection.recv_bytes())
        except (EOFError, OSError):  # closed, perhaps in the middle of a message
            self.put(key, None)

    def put(self, key: Any, message: bytes | None) -> None:
        """Add a message from another source; None ends the messages of `key`."""
        self._messages.put((key, message))

    def next(self, seconds: float) -> tuple[Any, bytes | None] | None:
        """Return key and bytes of the next message; None for the bytes: the connection ended; None: no message came."""
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return None


class WorkerGroup:
    """The workers of one role (actor or critic); every call goes to all ranks and has a deadline."""

    waits_for = ""  # the current call, and the ranks that have not answered it
    hooks: Sequence[tuple[str, str]] = ()  # the user's functions that may run in the ranks: flag and dotted path

    def __init__(
        self,
        role: str,
        num_ranks: int,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        heartbeat: float | None = None,
        module: str = WORKER,
    ):
        self.role = role
        self.watch: Callable[[], None] = self.check_alive  # called again and again during a call
        self.processes: list[Process] = []
        self._connections: list[Connection] = []
        for rank in range(num_ranks):
            joined = joined_ranks().pop(rank, None) if role == "actor" else None
            process: Process
            if joined is None:
                name, log = f"{role} rank {rank}", log_dir / f"{role}-rank{rank}.log"
                process, connection = start_rank(name, log, env or {}, heartbeat, module=module)
            else:
                process, connection = joined.start(log_dir, env or {}, heartbeat)
            self.processes.append(process)
            self._connections.append(connection)
        self._inbox = Inbox()
        for rank, connection in enumerate(self._connections):
            self._inbox.read(rank, connection)

    @property
    def num_ranks(self) -> int:
        return len(self.processes)

    def call(self, method: str, *args: Any, **how: Any) -> list[Any]:
        """Call `start`, and wait for the results."""
        return self.start(method, *args, **how)()

    def start(
        self,
        method: str,
        *args: Any,
        timeout: float,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        on_event: Callable[[Any], None] | None = None,
    ) -> Callable[[], list[Any]]:
        """Call `method` on every rank at once; return a function that waits for the results, by rank.

        The next call may begin only after this function.

        Args:
            args: the arguments of every rank; `per_rank` gives each rank its own arguments instead.
            timeout: seconds from now until the call fails with the stacks of all ranks.
            on_event: gets the events of ranks before their results.

        Raises (the function that waits):
            WorkerError: a rank died, was stopped, raised or did not answer in time. Named errors of a rank and errors
                of `watch` are raised unchanged.
            RolloutError: a fault in one of `hooks` ended a rank.
        """
        deadline = time.monotonic() + timeout
        requests: dict[int, memoryview] = {}  # ranks with the same arguments share one request
        for rank, connection in enumerate(self._connections):
            own = per_rank[rank] if per_rank is not None else args
            if (request := requests.get(id(own))) is None:
                request = requests[id(own)] = pickled((method, own))
            # In a thread, because a stopped rank reads nothing and would block the sender.
            threading.Thread(target=_send, args=(connection, request), name=f"send {method}", daemon=True).start()
        return lambda: self._wait(method, deadline, timeout, on_event)

    def _wait(self, method: str, deadline: float, timeout: float, on_event: Callable[[Any], None] | None) -> list[Any]:
        next_look = 0.0
        results: list[Any] = [None] * self.num_ranks
        waiting = set(range(self.num_ranks))
        while waiting:
            self.waits_for = (
                f"{method} from ranks {sorted(waiting)}, since {timeout - deadline + time.monotonic():.0f} s"
            )
            if (message := self._inbox.next(LOOK_SECONDS)) is not None:
                rank, data = message
                if data is None:
                    self._raise_death(rank, method)
                kind, *payload = pickle.loads(data)
                if kind == "event":
                    if on_event is not None:
                        on_event(payload[0])
                elif kind == "result":
                    results[rank] = payload[0]
                    waiting.discard(rank)
                else:
                    self._raise_remote(rank, method, *payload)
            if waiting and time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                for rank in sorted(waiting):
                    if self.processes[rank].fault():
                        self._raise_death(rank, method)
                self.watch()
            if waiting and time.monotonic() > deadline:
                self._raise_timeout(sorted(waiting), method, timeout)
        self.waits_for = ""
        return results

    def check_alive(self) -> None:
        """Raise WorkerError if a rank has ended, was stopped or hangs."""
        for rank, process in enumerate(self.processes):
            if process.fault():
                self._raise_death(rank)

    def _raise_death(self, rank: int, method: str = "") -> NoReturn:
        process = self.processes[rank]
        fault = process.fault()
        if fault is None:  # it closed its connection, so it ends in a moment
            process.died_within(1.0)
            fault = process.fault() or "closed its connection"
        memory = f"; a SIGKILL usually means too little memory: {LESS_MEMORY}" if not process.alive() else ""
        during = f", during '{method}'" if method else ""
        ended = process.describe()
        written = fault_of(ended)
        if (place := written.place(self.hooks)) is not None:
            what = f"{place[0]} ended {process.name} by a fault: {written.what}{during}"
            remedy = f"correct that line; the whole stack is in {process.log_path}"
            raise RolloutError(what, where=place[1], remedy=remedy)
        raise WorkerError(f"{process.name} {fault}{during}", where=ended, remedy=process.remedy() + memory)

    def _raise_remote(self, rank: int, method: str, error: BaseException | None, traceback: str) -> None:
        if isinstance(error, InstepError):
            raise error
        if any(sign in traceback for sign in OUT_OF_MEMORY):
            raise WorkerError(
                f"{self.role} rank {rank} ran out of memory in '{method}'",
                where=f"{traceback.rstrip().splitlines()[-1]} (its log: {self.processes[rank].log_path})",
                remedy=f"{LESS_MEMORY}; run again to resume from the last checkpoint",
            )
        deadline = time.monotonic() + 1.0  # a rank may report a lost peer before the peer's death is noticed
        while self.num_ranks > 1 and time.monotonic() < deadline:
            for other, process in enumerate(self.processes):
                if other != rank and not process.alive():
                    self._raise_death(other, method)
            time.sleep(0.05)
        raise WorkerError(
            f"{self.role} rank {rank} raised in '{method}':\n{traceback}",
            where=str(self.processes[rank].log_path),
            remedy="if this came from your hook, correct the hook; otherwise please report it with this text",
        )

    def _raise_timeout(self, ranks: list[int], method: str, timeout: float) -> None:
        for process in self.processes:
            process.dump_stacks()
        time.sleep(1.0)
        stacks = "\n".join(f"--- {p.name}\n{p.log_tail(60)}" for p in self.processes)
        raise WorkerError(
            f"{self.role} rank(s) {ranks} did not answer '{method}' within {timeout:.0f} s; the stacks of all ranks:\n"
            + stacks,
            remedy="the rank with a different stack is the one that the others wait for; "
            "raise --train-timeout if the work is simply larger",
            where="the training workers; their logs are in RUN_DIR/logs",
        )

    def close(self, grace: float = 3.0) -> None:
        stop_all(self.processes, grace)
        for connection in self._connections:
            connection.close()


def start_rank(
    name: str,
    log_path: Path,
    env: Mapping[str, str],
    heartbeat: float | None,
    pass_fds: Sequence[int] = (),
    module: str = WORKER,
) -> tuple[SupervisedProcess, Connection]:
    """Start the process of one rank, which runs `module`; only the connection reaches it."""
    ours, theirs = socket.socketpair()
    process = SupervisedProcess(
        name,
        [sys.executable, "-m", module],
        log_path,
        env={**env, CONNECTION_VARIABLE: str(theirs.fileno())},
        pass_fds=[theirs.fileno(), *pass_fds],
        heartbeat=heartbeat,
    )
    theirs.close()
    return process, Connection(ours.detach())


def pickled(message: Any) -> memoryview:
    """Return the bytes of `message`. Tensors become arrays, and their data is copied once, not four times (torch)."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    if (kind := getattr(sys.modules.get("torch"), "Tensor", None)) is not None:  # a Ray host does not import torch
        pickler.dispatch_table = copyreg.dispatch_table | {kind: _reduced}
    pickler.dump(message)
    return out.getbuffer()


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    of_numpy = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype not in of_numpy:
        return tensor.__reduce_ex__(5)  # type: ignore[return-value]
    return torch.from_numpy, (tensor.numpy(),)


def _send(connection: Connection, request: memoryview) -> None:
    with contextlib.suppress(OSError):  # the rank is dead; the waiting side notices it
        connection.send_bytes(request)


class WorkerChannel:
    """The worker's end of the connection."""

    def __init__(self) -> None:
        self._connection = Connection(int(os.environ.pop(CONNECTION_VARIABLE)))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Return the next request; raise EOFError when the controller has closed the connection."""
        return pickle.loads(self._connection.recv_bytes())

    def event(self, value: Any) -> None:
        self._send("event", value)

    def result(self, value: Any) -> None:
        self._send("result", value)

    def error(self, error: BaseException, traceback: str) -> None:
        self._send("error", error if isinstance(error, InstepError) else None, traceback)

    def _send(self, *message: Any) -> None:
        self._connection.send_bytes(pickled(message))

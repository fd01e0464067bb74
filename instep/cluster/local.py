"""The `local` cluster: one supervised subprocess per training rank, on one host, without Ray.

Controller and worker talk over a socket pair that only the two of them hold: a request is `(method, args)`, the
answers are any number of `("event", value)` and then one `("result", value)` or `("error", exception, traceback)`.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from instep.errors import InstepError, WorkerError
from instep.processes import SupervisedProcess, stop_all

CONNECTION_VARIABLE = "INSTEP_WORKER_FD"
SEND_SECONDS = 60  # a rank that takes no request for so long is stopped or dead


class WorkerGroup:
    """The workers of one role (the actor); every method call goes to all ranks and has a deadline."""

    def __init__(self, role: str, num_ranks: int, log_dir: Path, env: Mapping[str, str] | None = None):
        self.role = role
        self._processes: list[SupervisedProcess] = []
        self._connections: list[Connection] = []
        self.waits_for = ""  # the call that runs, and the ranks that have not answered it
        for rank in range(num_ranks):
            ours, theirs = socket.socketpair()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
            process = SupervisedProcess(
                f"{role} rank {rank}",
                [sys.executable, "-m", "instep.cluster.worker_main"],
                log_dir / f"{role}-rank{rank}.log",
                env={**(env or {}), CONNECTION_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._processes.append(process)
            self._connections.append(Connection(ours.detach()))

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        return tuple(self._processes)

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        on_event: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Call `method` on every rank at once and wait for all.

        Args:
            args: the same for every rank; `per_rank` instead gives each rank its own.
            timeout: seconds until the call fails with the stacks of all ranks.
            on_event: gets what ranks report on the way.

        Returns:
            The results, by rank.

        Raises:
            WorkerError: a rank died, raised or did not answer in time. A named error of a rank is raised as it is.
        """
        deadline = time.monotonic() + timeout
        for rank, connection in enumerate(self._connections):
            request = (method, per_rank[rank] if per_rank is not None else args)
            try:
                connection.send_bytes(pickle.dumps(request, protocol=5))
            except OSError:
                self._raise_death(rank, method)
        results: list[Any] = [None] * self.num_ranks
        waiting = dict(enumerate(self._connections))
        while waiting:
            self.waits_for = (
                f"{method} from ranks {sorted(waiting)}, since {timeout - deadline + time.monotonic():.0f} s"
            )
            ready = wait(list(waiting.values()), timeout=0.2)
            for rank in [r for r, c in waiting.items() if c in ready]:
                try:
                    kind, *payload = pickle.loads(waiting[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._raise_death(rank, method)
                if kind == "event":
                    if on_event is not None:
                        on_event(payload[0])
                elif kind == "result":
                    results[rank] = payload[0]
                    del waiting[rank]
                else:
                    self._raise_remote(rank, method, *payload)
            for rank in waiting:
                if not ready and not self._processes[rank].alive():
                    self._raise_death(rank, method)
            if waiting and time.monotonic() > deadline:
                self._raise_timeout(sorted(waiting), method, timeout)
        self.waits_for = ""
        return results

    def check_alive(self) -> None:
        """Raise WorkerError if a rank has ended."""
        for rank, process in enumerate(self._processes):
            if not process.alive():
                self._raise_death(rank, "waiting")

    def _raise_death(self, rank: int, method: str) -> None:
        process = self._processes[rank]
        for _ in range(20):
            if not process.alive():
                break
            time.sleep(0.05)
        raise WorkerError(
            f"a training worker died during '{method}'",
            where=process.describe_death(),
            remedy="see its log; a SIGKILL usually means memory: fewer --max-tokens-per-gpu or --micro-batch-size",
        )

    def _raise_remote(self, rank: int, method: str, error: BaseException | None, traceback: str) -> None:
        if isinstance(error, InstepError):
            raise error
        deadline = time.monotonic() + 1.0  # a rank that lost a peer answers before the peer's death is seen
        while self.num_ranks > 1 and time.monotonic() < deadline:
            for other, process in enumerate(self._processes):
                if other != rank and not process.alive():
                    self._raise_death(other, method)
            time.sleep(0.05)
        raise WorkerError(
            f"{self.role} rank {rank} raised in '{method}':\n{traceback}",
            where=str(self._processes[rank].log_path),
            remedy="if this came from a hook of yours, mend it there; otherwise please report it with this text",
        )

    def _raise_timeout(self, ranks: list[int], method: str, timeout: float) -> None:
        for process in self._processes:
            process.dump_stacks()
        time.sleep(1.0)
        stacks = "\n".join(f"--- {p.name}\n{p.log_tail(60)}" for p in self._processes)
        raise WorkerError(
            f"{self.role} rank(s) {ranks} did not answer '{method}' within {timeout:.0f} s; the stacks of all ranks:\n"
            + stacks,
            remedy="the rank whose stack differs from the others is the one they wait for; "
            "raise --train-timeout if the work is simply larger",
        )

    def close(self, grace: float = 3.0) -> None:
        stop_all(self._processes, grace)
        for connection in self._connections:
            connection.close()


class WorkerChannel:
    """The worker's end of the connection."""

    def __init__(self) -> None:
        self._connection = Connection(int(os.environ.pop(CONNECTION_VARIABLE)))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """The next request; EOFError when the controller has closed the connection."""
        return pickle.loads(self._connection.recv_bytes())

    def event(self, value: Any) -> None:
        self._send("event", value)

    def result(self, value: Any) -> None:
        self._send("result", value)

    def error(self, error: BaseException, traceback: str) -> None:
        self._send("error", error if isinstance(error, InstepError) else None, traceback)

    def _send(self, *message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

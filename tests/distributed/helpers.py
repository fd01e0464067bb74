"""Run functions on several ranks of a gloo process group, each rank a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instep.cluster.local import WorkerGroup
from tests.forks import MEGATRON, SERVER, Popen, using


class RankPool:
    """Processes that stay: ranks 0 .. world_size-1 of a default group, one thread each; with `cuda` one GPU each.

    With `megatron` they have imported Megatron-Core, with its stand-ins for CUDA. Without `group` they make their own.

    A context manager. After a failure the pool is closed: its ranks may stand anywhere.
    """

    def __init__(
        self, world_size: int, *, timeout: float = 600, cuda: bool = False, megatron: bool = False, group: bool = True
    ):
        self.timeout, self.closed = timeout, False
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            words = [rank, world_size, self._folder.name, timeout, int(cuda), int(group), theirs.fileno()]
            command = [sys.executable, "-m", "tests.distributed.helpers", *map(str, words)]
            with theirs, using(None if cuda else MEGATRON if megatron else SERVER):
                self._processes.append(Popen(command, pass_fds=[theirs.fileno()]))
            self._pipes.append(Connection(ours.detach()))

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(*args)` on all ranks; each rank's (picklable) result, by rank. `fn` is a module's top-level function.

        Raises:
            AssertionError: with the failing rank's traceback, or naming the ranks that did not answer in time.
        """
        try:
            for pipe in self._pipes:
                pipe.send_bytes(pickle.dumps((fn, args)))
            return self._collect()
        except BaseException:
            self.close()
            raise

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            pending = [p for rank, p in enumerate(self._pipes) if rank not in results]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            late = [rank for rank in range(len(self._pipes)) if rank not in results]
            assert ready, f"ranks {late} gave no answer in {self.timeout} s"
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise AssertionError(f"rank {rank} died without an answer") from None
                assert ok, f"rank {rank} raised:\n{value}"
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all ranks."""
        self.closed = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(60)
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, megatron: bool = False
) -> list[Any]:
    """`fn(*args)` once on fresh ranks; see `RankPool.run`."""
    with RankPool(world_size, timeout=timeout, megatron=megatron) as pool:
        return pool.run(fn, *args)


def spawn(fn: Callable[..., Any], num_ranks: int, *args: Any, megatron: bool = False) -> None:
    """`fn(rank, *args)` on fresh ranks without a group."""
    with RankPool(num_ranks, megatron=megatron, group=False) as pool:
        pool.run(_with_rank, fn, *args)


def _with_rank(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(int(os.environ["RANK"]), *args)


def started_workers(args: Any, role: str, num_ranks: int, logs: Path) -> WorkerGroup:
    """The workers of a role on loopback, as a run starts them."""
    with using(MEGATRON if args.train_backend == "megatron" else SERVER):
        return WorkerGroup(role, num_ranks, logs, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def _serve_rank(
    rank: int, world_size: int, folder: str, timeout: float, cuda: bool, group: bool, pipe: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is that of the tests
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if cuda:
        torch.cuda.set_device(rank)
    if group:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        how = {"store": store, "rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
        dist.init_process_group("nccl" if cuda else "gloo", **how)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = pickle.loads(message)
            answer = pickle.dumps((True, fn(*args)))  # tensors by value: nothing of this process outlives it
        except BaseException:  # noqa: BLE001 - a process border: the test raises it
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


if __name__ == "__main__":
    rank, size, folder, timeout, cuda, group, fd = sys.argv[1:]
    given = int(rank), int(size), folder, float(timeout), cuda == "1", group == "1"
    _serve_rank(*given, Connection(int(fd)))

"""Run a function on several ranks of a gloo process group, each rank a process of its own."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`fn(*args)` on ranks 0 .. world_size-1 of a default gloo group; each rank's (picklable) result, by rank.

    `fn` must be importable (a module's top-level function). One thread per rank. When a rank raises or dies, or when
    `timeout` seconds have passed, all are ended.

    Raises:
        AssertionError: with the failing rank's traceback, or naming the ranks that did not answer in time.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, world_size, folder, timeout, sender, fn, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(0.5)  # the good case: it has answered and is on its way out
                if process.is_alive():
                    process.kill()
                    process.join(5)


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [p for i, p in enumerate(pipes) if i not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[i for i in range(len(pipes)) if i not in results]} gave no answer in {timeout} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            assert ok, f"rank {rank} raised:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    rank: int, world_size: int, folder: str, timeout: float, pipe: Connection, fn: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        answer = pickle.dumps((True, fn(*args)))  # tensors by value: nothing of this process outlives it
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()
    dist.destroy_process_group()

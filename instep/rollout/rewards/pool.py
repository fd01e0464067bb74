"""A pool of reward workers: small processes beside the event loop.

Workers keep nothing from one job to the next. A worker is replaced when its job takes too long, or when it was killed.
In the second case another worker gets its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
from typing import Any

from instep.errors import RewardError
from instep.rollout import runtime
from instep.system.fork_server import Program, start
from instep.system.processes import OPENMP_ENV, num_usable_cpus
from instep.system.run_context import PerRun

logger = logging.getLogger(__name__)
NUM_THREADS = 8
LINE_BYTES = 1 << 24  # at most, of a worker's answer
NUM_TRIES = 3  # of a job whose worker dies: after the third death the job itself is at fault
START_SECONDS = 60.0  # for a worker to start and import math-verify on a busy machine
PATIENCE_SECONDS = 0.5  # before one more worker is started


@dataclasses.dataclass(eq=False)
class Worker:
    """A process and the event loop's end of the socket that is its stdin and stdout.

    asyncio's own subprocesses hang when they are cancelled at their start. They also write tracebacks when their loop
    closes before it has seen them end (Python 3.11).
    """

    process: Program
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls) -> Worker:
        """Start a worker. Raises OSError: no process could be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
            command, end = [sys.executable, "-m", "instep.rollout.rewards.worker"], theirs.fileno()
            try:  # the controller handles a Ctrl-C in the terminal
                process = start(command, {**os.environ, **OPENMP_ENV}, (end, end, 2))
            except OSError:
                writer.close()
                raise
        return cls(process, reader, writer)

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, or {} if the worker has died."""
        try:
            self.writer.write(json.dumps(job).encode() + b"\n")
            await self.writer.drain()
            answer: dict[str, Any] = json.loads(await self.reader.readline() or "{}")
        except (BrokenPipeError, ConnectionResetError):
            return {}
        return answer

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it takes milliseconds
            self.process.wait(1.0)
        self.writer.close()


class RewardPool:
    """At most `num_workers` worker processes, for one event loop.

    A worker takes seconds to start and milliseconds for most jobs. So a job waits for the first free worker, and
    another worker is started only when that takes long.

    Args:
        lasting: the user closes the pool; otherwise it ends with its loop, for example a hook's own `asyncio.run`.
    """

    def __init__(self, num_workers: int, lasting: bool = True) -> None:
        self.threads = asyncio.Semaphore(NUM_THREADS)  # for custom functions that are not async
        self.programs = asyncio.Semaphore(num_workers)  # of models, each in a sandbox
        self._num_workers = num_workers
        self._ready: asyncio.Queue[Worker] = asyncio.Queue()
        self._all: set[Worker] = set()
        self._warming: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._until_end = None if lasting else asyncio.create_task(self._close_with_loop())

    def warm(self) -> None:
        """Start a worker if none exists."""
        if not self._all and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self._warm())

    async def equal(self, answer: str, label: str, *, timeout: float, where: str) -> bool:
        """Return whether two answers are equal as mathematics.

        Raises:
            RewardError: it took more than `timeout` seconds (the worker is killed), or the worker failed.
        """
        result: dict[str, Any] = {}
        for _ in range(NUM_TRIES):
            try:
                worker = await self._free_worker()
            except OSError as error:
                what, remedy = f"a reward worker did not start: {error}", "see memory and processes"
                raise RewardError(what, where=where, remedy=remedy) from error
            try:
                result = await asyncio.wait_for(worker.ask({"answer": answer, "label": label}), timeout)
            except TimeoutError:
                what = f"the math reward took more than {timeout:g} s for the answer {answer!r:.80}"
                remedy = "raise --reward-timeout, or use a simpler label"
                raise RewardError(what, where=where, remedy=remedy) from None
            finally:
                if result:
                    self._ready.put_nowait(worker)
                else:  # also when this task is cancelled: its worker has not finished the job
                    self._kill(worker)
            if result:
                break
            logger.warning("a reward worker (pid %d) has ended: its job is given to another one", worker.process.pid)
        else:
            died = f"the worker of the math reward died, {NUM_TRIES} times, with the answer {answer!r:.80}"
            raise RewardError(died, where=where, remedy="was it killed for its memory?")
        if "error" in result:
            remedy = "install math-verify (instep install cpu)" if "math_verify" in result["error"] else ""
            raise RewardError(f"the math reward raised {result['error']}", where=where, remedy=remedy)
        return bool(result["is"])

    async def _free_worker(self) -> Worker:
        """Return the first free worker. Raises OSError: none is free, and none starts."""
        while True:
            self.warm()
            try:
                worker = await asyncio.wait_for(self._ready.get(), PATIENCE_SECONDS)
            except TimeoutError:
                async with self._starting:  # one at a time, else each job that waits would start one
                    if self._ready.empty() and len(self._all) < self._num_workers:
                        return await self._start()
                continue
            if worker.process.poll() is None:
                return worker
            self._kill(worker)  # it ended while it was idle

    async def _warm(self) -> None:
        async with self._starting:
            with contextlib.suppress(OSError):  # a job that needs a worker starts one, and raises this
                self._ready.put_nowait(await self._start())

    async def _start(self) -> Worker:
        worker = await Worker.start()
        self._all.add(worker)
        first: dict[str, Any] = {}
        try:
            first = await asyncio.wait_for(worker.ask({"answer": "1", "label": "1"}), START_SECONDS)
        except TimeoutError:
            raise OSError(f"it was not ready after {START_SECONDS:.0f} s") from None
        finally:
            if not first:
                self._kill(worker)
        if not first:
            raise OSError("it ended before it was ready")
        return worker

    def _kill(self, worker: Worker) -> None:
        self._all.discard(worker)
        worker.kill()

    async def _close_with_loop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """End all workers."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        for worker in list(self._all):
            self._kill(worker)
            await asyncio.sleep(0)  # the loop closes the socket


_pools: PerRun[dict[asyncio.AbstractEventLoop, RewardPool]] = PerRun(dict)  # only that of the last loop


def shared_pool(num_workers: int | None = None) -> RewardPool:
    """Return the pool of the running loop, by default with a worker for every two cores, at most 8."""
    pools, loop = _pools(), asyncio.get_running_loop()
    if loop not in pools:
        lasting = runtime.is_own_thread()
        pools.clear()
        pools[loop] = RewardPool(num_workers or max(1, min(8, num_usable_cpus() // 2)), lasting)
        if lasting:
            runtime.at_shutdown(pools[loop].close)
    return pools[loop]

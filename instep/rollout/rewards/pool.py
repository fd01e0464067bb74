"""A pool of reward workers: small processes beside the event loop.

They keep nothing from one job to the next. One whose job takes too long is replaced; one that was stopped or killed is
replaced, too, and its job given to another.
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
from instep.rollout.rewards.rules import Algebra
from instep.system.fork_server import Program, start
from instep.system.kernel import state_of
from instep.system.processes import OPENMP_ENV, num_usable_cpus

logger = logging.getLogger(__name__)
NUM_THREADS = 8
LINE_BYTES = 1 << 24  # of a worker's answer, at most
NUM_TRIES = 3  # of a job whose worker ends: the third death is the job's own fault
LOOK_SECONDS = 0.5  # between two looks at whether a worker stands stopped
START_SECONDS = 60.0  # for a worker to start and import math-verify on a busy machine
PATIENCE_SECONDS = 0.5  # before one more worker is started


@dataclasses.dataclass(eq=False)
class Worker:
    """A process and the event loop's end of the socket that is its stdin and stdout.

    asyncio's own subprocesses hang when they are cancelled at their start, and write tracebacks when their loop is
    closed before it has seen them end (Python 3.11).
    """

    process: Program
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls) -> Worker:
        """Raises OSError: no process could be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
            command, end = [sys.executable, "-m", "instep.rollout.rewards.worker"], theirs.fileno()
            try:  # a Ctrl-C in the terminal is the controller's to handle
                process = start(command, {**os.environ, **OPENMP_ENV}, (end, end, 2))
            except OSError:
                writer.close()
                raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer, or {} if it has died."""
        try:
            self.writer.write(json.dumps(job, default=str).encode() + b"\n")  # rules compare the text of all values
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

    A worker takes seconds to start and milliseconds for most jobs: a job waits for the first free worker, and another
    worker is started only when that takes long.

    Args:
        lasting: somebody closes it; else it ends with its loop, that of a hook's own `asyncio.run`.
    """

    def __init__(self, num_workers: int, lasting: bool = True) -> None:
        self._lasting = lasting
        self.threads = asyncio.Semaphore(NUM_THREADS)  # for custom functions that are not async
        self.programs = asyncio.Semaphore(num_workers)  # of models, each in a sandbox
        self._num_workers = num_workers
        self._ready: asyncio.Queue[Worker | OSError] = asyncio.Queue()
        self._num_waiting = 0  # jobs without a worker
        self._all: set[Worker] = set()
        self._starting: set[asyncio.Task[Worker | OSError]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    def warm(self) -> None:
        """Start a worker if there is none."""
        if self._closed:  # the jobs are being cancelled
            return
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_workers())
        if not self._all and not self._starting:
            self._start()

    async def equal(self, answer: str, label: str, *, timeout: float, where: str) -> bool:
        """Whether two answers are equal as mathematics. Raises: as `grade`."""
        job, what = {"answer": answer, "label": label}, f"the answer {answer!r:.80}"
        return bool(await self._done(job, "math", what, timeout, where))

    async def grade(self, job: dict[str, Any], *, timeout: float, where: str) -> Any:
        """What `rules.grade(**job)` returns.

        Raises:
            RewardError: it took more than `timeout` seconds (the worker is killed), or the worker failed.
        """
        what = f"the response {job['response']!r:.80} of {len(job['response'])} characters"
        out = await self._done(job, job["name"], what, timeout, where)
        return Algebra(*out) if isinstance(out, list) else out

    async def _done(self, job: dict[str, Any], rule: str, what: str, timeout: float, where: str) -> Any:
        result: dict[str, Any] = {}
        for _ in range(NUM_TRIES):
            worker = await self._free_worker(where)
            try:
                result = await asyncio.wait_for(worker.ask(job), timeout)
            except TimeoutError:
                if state_of(worker.pid) != "stopped":  # else it has not worked on it
                    raise RewardError(
                        f"the {rule} reward took more than {timeout:g} s for {what}",
                        where=where,
                        remedy="raise --reward-timeout, or use a simpler label",
                    ) from None
            finally:
                if result:
                    self._ready.put_nowait(worker)
                else:  # also when this task is cancelled: its worker is in the middle of a job
                    self._kill(worker)
                    if self._ready.empty():  # other jobs may wait
                        self.warm()
            if result:
                break
            logger.warning("a reward worker (pid %d) has ended: its job is given to another one", worker.pid)
        else:
            died = f"the worker of the {rule} reward died, {NUM_TRIES} times, with {what}"
            raise RewardError(died, where=where, remedy="was it killed for its memory?")
        if "error" in result:
            remedy = "install math-verify (pip install 'instep[rewards]')" if "math_verify" in result["error"] else ""
            raise RewardError(f"the {rule} reward raised {result['error']}", where=where, remedy=remedy)
        return result["is"]

    async def _free_worker(self, where: str) -> Worker:
        """The first that is free; a wait for it is bounded, as the earlier jobs and its start are."""
        self._num_waiting += 1
        try:
            worker = await self._next_worker()
        finally:
            self._num_waiting -= 1
        if isinstance(worker, OSError):
            if self._num_waiting and not self._all and not self._starting:
                self._ready.put_nowait(worker)  # the others wait for nothing: each gets this error
            remedy = "see memory and processes"
            raise RewardError(f"a reward worker did not start: {worker}", where=where, remedy=remedy)
        return worker

    async def _next_worker(self) -> Worker | OSError:
        self.warm()
        try:
            worker = await asyncio.wait_for(self._ready.get(), PATIENCE_SECONDS)
        except TimeoutError:
            if not self._starting and len(self._all) < self._num_workers:
                self._start()
            worker = await self._ready.get()
        while not isinstance(worker, OSError) and worker.ended:  # it ended with nothing to do
            self._kill(worker)
            self.warm()
            worker = await self._ready.get()
        return worker

    def _start(self) -> None:
        task = asyncio.create_task(self._start_worker())
        self._starting.add(task)
        task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[Worker | OSError]) -> None:
        self._starting.discard(task)
        if not task.cancelled():
            self._ready.put_nowait(task.result())

    async def _start_worker(self) -> Worker | OSError:
        for _ in range(NUM_TRIES):
            try:
                worker = await Worker.start()
            except OSError as error:
                return error
            self._all.add(worker)
            try:
                first = await asyncio.wait_for(worker.ask({"answer": "1", "label": "1"}), START_SECONDS)
            except TimeoutError:
                self._kill(worker)
                return OSError(f"it was not ready after {START_SECONDS:.0f} s")
            if first:
                return worker
            self._kill(worker)  # somebody else has ended it
        return OSError(f"it ended before it was ready, {NUM_TRIES} times")

    async def _watch_workers(self) -> None:
        """End workers that two looks find stopped, at work or not: they keep nothing, and another takes their place."""
        stopped = set[Worker]()
        try:
            while True:
                before, stopped = stopped, {w for w in self._all if state_of(w.pid) == "stopped"}
                for worker in before & stopped & self._all:
                    logger.warning("a reward worker (pid %d) was stopped (SIGSTOP): it is replaced", worker.pid)
                    self._kill(worker)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for worker in () if self._lasting else list(self._all):
                self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        self._all.discard(worker)
        worker.kill()

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._starting, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in list(self._all):
            self._kill(worker)
            await asyncio.sleep(0)  # the loop closes the socket


_pool: tuple[asyncio.AbstractEventLoop, RewardPool] | None = None


def shared_pool(num_workers: int | None = None) -> RewardPool:
    """The pool of the running loop, by default with a worker for every two cores, at most 8."""
    global _pool
    loop = asyncio.get_running_loop()
    if _pool is None or _pool[0] is not loop:
        lasting = runtime.is_own_thread()
        _pool = (loop, RewardPool(num_workers or max(1, min(8, num_usable_cpus() // 2)), lasting))
        if lasting:
            runtime.at_shutdown(_pool[1].close)
    return _pool[1]

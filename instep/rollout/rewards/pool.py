"""A pool of reward workers: small processes beside the event loop.

They keep nothing from one job to the next. One whose job takes too long is replaced; one that was stopped or killed is
replaced, too, and its job given to another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from instep.errors import RewardError
from instep.kernel import state_of, stopped
from instep.processes import num_usable_cpus
from instep.rollout import runtime

logger = logging.getLogger(__name__)
NUM_THREADS = 8
NUM_TRIES = 3  # of a job whose worker ends: the third death is the job's own fault
LOOK_SECONDS = 0.5  # between two looks at whether a worker stands stopped
START_SECONDS = 60.0  # for a worker to start and import math-verify on a busy machine
PATIENCE_SECONDS = 0.5  # before one more worker is started


class RewardPool:
    """At most `num_workers` worker processes, for one event loop.

    A worker takes seconds to start and milliseconds for most jobs: a job waits for the first free worker, and another
    worker is started only when that takes long.
    """

    def __init__(self, num_workers: int) -> None:
        self.threads = asyncio.Semaphore(NUM_THREADS)  # for custom functions that are not async
        self.programs = asyncio.Semaphore(num_workers)  # of models, each in a sandbox
        self._num_workers = num_workers
        self._ready: asyncio.Queue[asyncio.subprocess.Process | OSError] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Start a worker if there is none."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_workers())
        if not self._all and not self._starting:
            self._start()

    async def equal(self, answer: str, label: str, *, timeout: float, where: str) -> bool:
        """Whether two answers are equal as mathematics.

        Raises:
            RewardError: it took more than `timeout` seconds (the worker is killed), or the worker failed.
        """
        result: dict[str, Any] = {}
        for _ in range(NUM_TRIES):
            worker = await self._free_worker(where)
            try:
                result = await asyncio.wait_for(_ask(worker, {"answer": answer, "label": label}), timeout)
            except TimeoutError:
                if state_of(worker.pid) != "T":  # else it has not worked on it
                    raise RewardError(
                        f"the math reward took more than {timeout:g} s for the answer {answer!r:.80}",
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
            what = f"the worker of the math reward died, {NUM_TRIES} times, with the answer {answer!r:.80}"
            raise RewardError(what, where=where, remedy="was it killed for its memory?")
        if "error" in result:
            remedy = "install math-verify (pip install 'instep[rewards]')" if "math_verify" in result["error"] else ""
            raise RewardError(f"the math reward raised {result['error']}", where=where, remedy=remedy)
        return bool(result["equal"])

    async def _free_worker(self, where: str) -> asyncio.subprocess.Process:
        """The first that is free; a wait for it is bounded, as the earlier jobs and its start are."""
        self.warm()
        try:
            worker = await asyncio.wait_for(self._ready.get(), PATIENCE_SECONDS)
        except TimeoutError:
            if not self._starting and len(self._all) < self._num_workers:
                self._start()
            worker = await self._ready.get()
        while not isinstance(worker, OSError) and worker.returncode is not None:  # it ended with nothing to do
            self._kill(worker)
            self.warm()
            worker = await self._ready.get()
        if isinstance(worker, OSError):
            remedy = "see memory and processes"
            raise RewardError(f"a reward worker did not start: {worker}", where=where, remedy=remedy)
        return worker

    def _start(self) -> None:
        task = asyncio.create_task(self._start_worker())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_worker(self) -> None:
        for _ in range(NUM_TRIES):
            try:
                worker = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "instep.rollout.rewards.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C in the terminal is the controller's to handle
                )
            except OSError as error:
                self._ready.put_nowait(error)
                return
            self._all.add(worker)
            try:
                first = await asyncio.wait_for(_ask(worker, {"answer": "1", "label": "1"}), START_SECONDS)
            except TimeoutError:
                self._kill(worker)
                self._ready.put_nowait(OSError(f"it was not ready after {START_SECONDS:.0f} s"))
                return
            if first:
                self._ready.put_nowait(worker)
                return
            self._kill(worker)  # somebody else has ended it
        self._ready.put_nowait(OSError(f"it ended before it was ready, {NUM_TRIES} times"))

    async def _watch_workers(self) -> None:
        """End workers that stand stopped, at work or not: they keep nothing, and another one takes their place."""
        while True:
            for worker in list(self._all):
                if stopped(worker.pid):
                    logger.warning("a reward worker (pid %d) was stopped (SIGSTOP): it is replaced", worker.pid)
                    self._kill(worker)
            await asyncio.sleep(LOOK_SECONDS)

    def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        if worker.returncode is None:
            worker.kill()

    async def close(self) -> None:
        for task in [*self._starting, *([self._watch] if self._watch is not None else [])]:
            task.cancel()
        for worker in list(self._all):
            self._kill(worker)
            await worker.wait()


async def _ask(worker: asyncio.subprocess.Process, job: dict[str, Any]) -> dict[str, Any]:
    """The worker's answer, or {} if it has died."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(job).encode() + b"\n")
        await worker.stdin.drain()
        answer: dict[str, Any] = json.loads(await worker.stdout.readline() or "{}")
    except (BrokenPipeError, ConnectionResetError):
        return {}
    return answer


_pool: tuple[asyncio.AbstractEventLoop, RewardPool] | None = None


def shared_pool(num_workers: int | None = None) -> RewardPool:
    """The pool of the running loop, by default with a worker for every two cores, at most 8."""
    global _pool
    loop = asyncio.get_running_loop()
    if _pool is None or _pool[0] is not loop:
        _pool = (loop, RewardPool(num_workers or max(1, min(8, num_usable_cpus() // 2))))
        runtime.at_shutdown(_pool[1].close)
    return _pool[1]

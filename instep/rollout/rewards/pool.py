"""Reward workers: a few small processes beside the event loop, replaced when a job takes too long."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from instep.errors import RewardError
from instep.processes import num_usable_cpus
from instep.rollout import runtime

NUM_THREADS = 8
START_SECONDS = 60.0  # for a worker to start and import math-verify on a busy machine


class RewardPool:
    """At most `num_workers` worker processes, started when they are needed. Lives on one event loop."""

    def __init__(self, num_workers: int) -> None:
        self.threads = asyncio.Semaphore(NUM_THREADS)  # for custom functions that are not async
        self._free = asyncio.Semaphore(num_workers)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def equal(self, answer: str, label: str, *, timeout: float, where: str) -> bool:
        """Whether two answers are equal as mathematics.

        Raises:
            RewardError: it took more than `timeout` seconds (the worker is killed), or the worker failed.
        """
        async with self._free:
            start_limit = timeout if self._idle else START_SECONDS
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                result = await self._work(worker, {"answer": answer, "label": label}, start_limit, timeout)
            except TimeoutError:
                raise RewardError(
                    f"the math reward took more than {timeout:g} s for the answer {answer!r:.80}",
                    where=where,
                    remedy="raise --reward-timeout, or use a simpler label",
                ) from None
            finally:  # also when this task is cancelled: a worker with half a job is of no use
                if worker not in self._idle:
                    self._kill(worker)
        if "error" in result:
            remedy = "install math-verify (pip install 'instep[rewards]')" if "math_verify" in result["error"] else ""
            raise RewardError(f"the math reward raised {result['error']}", where=where, remedy=remedy)
        return bool(result["equal"])

    async def _work(
        self, worker: asyncio.subprocess.Process, job: dict[str, Any], start_limit: float, timeout: float
    ) -> dict[str, Any]:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            await worker.stdin.drain()
            result = json.loads(await asyncio.wait_for(worker.stdout.readline(), start_limit) or "{}")
            if "started" in result:
                result = json.loads(await asyncio.wait_for(worker.stdout.readline(), timeout) or "{}")
        except (BrokenPipeError, ConnectionResetError):
            result = {}
        if not result:
            return {"error": "the reward worker died"}
        self._idle.append(worker)
        return result

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "instep.rollout.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the controller's to handle
        )
        self._all.add(worker)
        return worker

    def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        if worker.returncode is None:
            worker.kill()

    async def close(self) -> None:
        for worker in list(self._all):
            self._kill(worker)
            await worker.wait()
        self._idle.clear()


_pool: tuple[asyncio.AbstractEventLoop, RewardPool] | None = None


def shared_pool(num_workers: int | None = None) -> RewardPool:
    """The pool of the running loop; by default with half as many workers as cores, at most 8."""
    global _pool
    loop = asyncio.get_running_loop()
    if _pool is None or _pool[0] is not loop:
        _pool = (loop, RewardPool(num_workers or max(1, min(8, num_usable_cpus() // 2))))
        runtime.at_shutdown(_pool[1].close)
    return _pool[1]

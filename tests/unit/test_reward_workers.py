"""The processes of the math reward: whatever becomes of one, the job is answered, or its own fault is named."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from instep.errors import RewardError
from instep.rollout import runtime
from instep.rollout.rewards import pool as pools
from instep.rollout.rewards.pool import Worker, shared_pool
from tests.bounds import allowed


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    runtime.shutdown()


def test_a_worker_that_hangs_is_replaced() -> None:
    async def scenario() -> tuple[set[int], set[int], bool]:
        pool = shared_pool()
        assert await pool.equal(r"\sqrt{4}", "2", timeout=20, where="")
        first = {w.process.pid for w in pool._all}
        with pytest.raises(RewardError, match="took more than 0.5 s") as caught:
            await pool.equal("9^{9^{9^{9}}}", "3", timeout=0.5, where="group 1, sample 2")
        assert "group 1, sample 2" in caught.value.where
        again = await pool.equal(r"\sqrt{9}", "3", timeout=20, where="")
        return first, {w.process.pid for w in pool._all}, again

    first, second, again = runtime.run(scenario(), timeout=60)
    assert again and len(first) == 1 and not first & second
    assert _gone(first.pop())


def test_the_workers_of_a_hooks_own_loop_end_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    """A rollout function may call `asyncio.run(async_rm(...))`, more than once; the run ends without a traceback."""

    async def scenario() -> set[int]:
        assert await shared_pool().equal(r"\sqrt{4}", "2", timeout=60, where="")
        return {w.process.pid for w in shared_pool()._all}

    async def rollout() -> list[set[int]]:
        return [await asyncio.to_thread(asyncio.run, scenario()) for _ in range(2)]

    first, second = runtime.run(rollout(), timeout=100)
    assert not first & second and all(map(_gone, first | second))
    runtime.shutdown()
    assert "Traceback" not in capfd.readouterr().err


async def _disturbed(idle_seconds: float) -> tuple[set[int], set[int], bool]:
    """The workers before and after their death, and the answer to the job that comes `idle_seconds` later."""
    pool = shared_pool()
    assert await pool.equal(r"\sqrt{4}", "2", timeout=60, where="")
    first = {w.process.pid for w in pool._all}
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(idle_seconds)
    answer = await pool.equal(r"\sqrt{9}", "3", timeout=60, where="")
    return first, {w.process.pid for w in pool._all}, answer


@pytest.mark.parametrize("idle_seconds", [0, 0.5])
def test_a_worker_that_was_killed_is_replaced_and_its_job_done(idle_seconds: float) -> None:
    began = time.monotonic()
    first, second, answer = runtime.run(_disturbed(idle_seconds), timeout=60)
    assert answer is True and not first & second and _gone(first.pop())
    assert time.monotonic() - began < allowed(30)


def test_a_job_that_ends_every_worker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pool = shared_pool()
        ask = Worker.ask

        async def deadly(worker: Worker, job: dict[str, Any]) -> dict[str, Any]:
            if job["label"] == "deadly":
                os.kill(worker.process.pid, signal.SIGKILL)
            return await ask(worker, job)

        monkeypatch.setattr(Worker, "ask", deadly)
        await pool.equal("x", "deadly", timeout=60, where="group 1, sample 2")

    with pytest.raises(RewardError, match="the worker of the math reward died, 3 times") as caught:
        runtime.run(scenario(), timeout=90)
    assert caught.value.where == "group 1, sample 2"


def test_a_worker_that_does_not_start_is_an_error_of_every_job_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_: type[Worker]) -> Worker:
        await asyncio.sleep(0.1)
        raise OSError("no memory")

    async def scenario() -> list[bool | BaseException]:
        pool = shared_pool(2)
        jobs = [pool.equal("x", "y", timeout=2, where=f"sample {i}") for i in range(4)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert pool._ready.empty()  # nothing is left for later jobs
        return errors

    monkeypatch.setattr(pools, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(Worker, "start", classmethod(failing))
    errors = runtime.run(scenario(), timeout=10)
    assert [isinstance(e, RewardError) and e.where for e in errors] == [f"sample {i}" for i in range(4)]
    assert all("a reward worker did not start: no memory" in str(e) for e in errors)


def test_workers_are_light_and_die_with_their_parent() -> None:
    script = (
        "import asyncio, time\n"
        "from instep.rollout.rewards.pool import RewardPool\n"
        "async def main():\n"
        "    pool = RewardPool(1)\n"
        "    assert await pool.equal(r'\\sqrt{4}', '2', timeout=20, where='')\n"
        "    print(next(iter(pool._all)).process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert _alive(worker)
        with open(f"/proc/{worker}/maps") as maps:
            assert "libtorch" not in maps.read()
        os.kill(worker, signal.SIGSTOP)  # as one that computes and cannot see that its parent is gone
        parent.kill()
    assert _gone(worker)


def test_an_ending_in_the_middle_of_jobs_and_starts_is_silent() -> None:
    """With asyncio's own subprocesses, whose end it had not seen when the loop was closed, it wrote a traceback."""
    script = """if True:
        import contextlib, gc, threading, time
        from instep.errors import InstepError
        from instep.rollout import runtime
        from instep.rollout.rewards.pool import shared_pool

        async def job():
            await shared_pool(2).equal("9^{9^{9^{9}}}", "3", timeout=60, where="")

        def run():
            with contextlib.suppress(InstepError):
                runtime.run(job())

        for seconds in (0.001, 0.01, 0.1, 0.3, 1.5, 1.5):
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(seconds)
            runtime.shutdown()
            thread.join()
            gc.collect()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)

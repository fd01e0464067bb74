"""The rollouts' event loop ends without a complaint, whatever it is doing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from instep.errors import RewardError
from instep.rollout import runtime

BUSY = """
import asyncio, threading, time
from instep.rollout import runtime

async def reward(seconds):
    time.sleep(seconds)  # as a hook that allocates, or computes
    await asyncio.sleep(60)

async def rollout(num, seconds):
    await asyncio.gather(*(asyncio.gather(reward(seconds)) for _ in range(num)))

threading.Thread(target=lambda: runtime.run(rollout({num}, {seconds})), daemon=True).start()
time.sleep(0.3)
began = time.monotonic()
runtime.shutdown()
print(time.monotonic() - began)
time.sleep(2)  # engines and workers end meanwhile
"""


@pytest.mark.parametrize("num, seconds, limit", [(20, 0.01, 1.5), (15, 0.2, 4.0)])
def test_an_end_in_the_middle_of_tasks_is_silent(num: int, seconds: float, limit: float) -> None:
    """Also where they hold the loop for longer than the end waits."""
    code = BUSY.format(num=num, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and float(done.stdout) < limit
    assert "destroyed" not in done.stderr and "never retrieved" not in done.stderr, done.stderr


def test_a_loop_that_was_left_behind_does_nothing_to_its_successor() -> None:
    """What it had scheduled blocks it once more, is bounded by nobody, and is then cancelled."""
    began, ended = [], []

    async def blocks(number: int) -> None:
        began.append(number)
        time.sleep(1.0)  # noqa: ASYNC251 - the fault under test
        await asyncio.sleep(0.01)
        ended.append(number)

    async def job(number: int) -> None:
        await runtime.bounded_steps(blocks(number), 0.2, RewardError(f"{number} blocks", where="here", remedy=""))

    with pytest.raises(RewardError, match="0 blocks"):
        runtime.run(runtime.gather([job(0), job(1)]), timeout=20)
    runtime.run(asyncio.sleep(3.0), timeout=20)  # before, job 1 raised its error here
    assert began == [0, 1] and ended == []

"""slime's grader of boxed answers, under its names."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

from instep.errors import RewardError
from instep.rollout.rewards.pool import NUM_THREADS, START_SECONDS, RewardPool
from instep.rollout.rewards.text import MAX_ALGEBRA_CHARS, last_boxed, quick_equal

ALGEBRA_SECONDS = 10.0  # of a worker, for one comparison


def extract_answer(passage: str) -> str | None:
    """Return the content of the last `\\boxed{...}`; None without one."""
    return last_boxed(passage)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Return whether the last `\\boxed{...}` of a response equals the label (--rm-type math).

    The label may be boxed, too. If only algebra can decide, this call blocks, for milliseconds once a worker runs.
    `await async_rm(...)` does not block.

    Raises:
        RewardError: a comparison took too long, or its worker failed.
    """
    answer, label = extract_answer(solution_str), "" if ground_truth is None else str(ground_truth)
    label = extract_answer(label) or label
    if answer is None or not label:
        return False
    equal = quick_equal(answer, label)
    if equal is not None or max(len(answer), len(label)) > MAX_ALGEBRA_CHARS:
        return bool(equal)
    loop, pool = _grader()
    work = pool.equal(answer, label, timeout=ALGEBRA_SECONDS, where="grade_answer_verl")
    graded, seconds = asyncio.run_coroutine_threadsafe(work, loop), START_SECONDS + NUM_THREADS * ALGEBRA_SECONDS
    try:
        return graded.result(seconds)
    except TimeoutError:
        graded.cancel()
        what = f"no worker graded {answer!r:.40} within {seconds:.0f} s"
        remedy = "check the free memory and the process limit; `await async_rm(...)` waits for no other caller"
        raise RewardError(what, where="grade_answer_verl", remedy=remedy) from None


@functools.cache
def _grader() -> tuple[asyncio.AbstractEventLoop, RewardPool]:
    """Return a separate worker and its loop, because the caller may run on the rollout's loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="instep-grader", daemon=True).start()
    return loop, RewardPool(1)

"""A rollout sends no more samples at once than engines hold; groups come in whole and in order."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from instep.engines.vllm import tokens_of_caches
from instep.rollout import execute
from instep.rollout.kv_budget import KVBudget
from instep.rollout.request_gate import gate
from instep.types import Sample, Status


def test_groups_come_in_whole_and_in_order() -> None:
    async def main() -> None:
        room, came = KVBudget(5, 100.0), list[int]()

        async def group(number: int, size: int, tokens: float) -> None:
            await room.enter(size, tokens)
            came.append(number)

        tasks = [asyncio.create_task(group(i, size, 10.0)) for i, size in enumerate((3, 3, 1))]
        await asyncio.sleep(0)
        assert came == [0] and room.num_inside == 3  # the last would fit, and waits for its turn
        room.leave(10.0)
        await tasks[1]
        assert came == [0, 1] and room.num_inside == 5
        room.leave(10.0)
        await asyncio.wait_for(tasks[2], 5)
        assert came == [0, 1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("tokens, at_once", [(10.0, 10), (25.0, 4), (1000.0, 1)])
def test_expected_tokens_stay_below_the_caches(tokens: float, at_once: int) -> None:
    async def main() -> int:
        room, most = KVBudget(1024, 100.0), 0

        async def sample() -> None:
            nonlocal most
            await room.enter(1, tokens)
            most = max(most, room.num_inside)
            await asyncio.sleep(0)
            room.leave(tokens)

        await asyncio.gather(*(sample() for _ in range(40)))
        assert room.num_inside == 0 and room.tokens_inside == 0.0
        return most

    assert asyncio.run(main()) == at_once


def test_who_is_cancelled_leaves_no_trace() -> None:
    async def main() -> None:
        room = KVBudget(2, math.inf)
        await room.enter(2, 1.0)
        waiting = [asyncio.create_task(room.enter(1, 1.0)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        room.leave(1.0)  # calls the second, which is cancelled before it has come
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[2].exception() is None and room.num_inside == 2

    asyncio.run(main())


CACHE = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="{}",sliding_window="None"}} 1.0\n'
SIZE = 'vllm:cache_config_info{{block_size="16",engine="{}",kv_cache_size_tokens="{}",num_gpu_blocks="2000"}} 1.0\n'


def test_vllms_metrics_say_what_its_caches_hold() -> None:
    """Blocks are those of all replicas, on the line of each; tokens are its own."""
    replicas = "# HELP x\n" + CACHE.format(0, 2000) + CACHE.format(1, 2000) + "vllm:num_requests_running{} 0\n"
    assert tokens_of_caches(replicas) == 32000
    assert tokens_of_caches(SIZE.format(0, 15000) + SIZE.format(1, 15000)) == 30000
    assert tokens_of_caches("") == tokens_of_caches(CACHE.format(0, None)) == math.inf


def test_a_rollout_expects_the_lengths_of_the_last_one() -> None:
    args: Any = SimpleNamespace(
        rollout_engine_urls=["a", "b"], reward_key=None, rollout_max_context_len=None, rollout_max_response_len=100
    )
    gate().num_cached_tokens = 5000.0
    try:
        execute._last().clear()
        first = execute.new_execution(args, 0)
        assert first.expected_tokens == 0.0  # nothing is known
        first.lengths.num_samples, first.lengths.num_tokens, first.lengths.num_prompt_tokens = 10, 200, 80
        assert execute.new_execution(args, 0, evaluation=True).expected_tokens == 0.0
        second = execute.new_execution(args, 1)
        assert second.expected_tokens == second.tokens_of_group(1) == 20.0 and second.tokens_of_group(4) == 14.0
        assert execute.new_execution(args, 1, is_trial=True).expected_tokens == 0.0  # nothing came of the second yet
        assert execute.new_execution(args, 2).expected_tokens == 0.0  # nothing came of the second
        assert second.kv_budget._num_tokens == 5000.0 and second.kv_budget._num_samples == 2048
    finally:
        gate().reset()
        execute._last().clear()


def test_a_rollout_expects_the_spread_of_the_last_one() -> None:
    args: Any = SimpleNamespace(rollout_engine_urls=["a"], reward_key=None, rollout_max_context_len=None)
    execute._last().clear()
    try:
        first = execute.new_execution(args, 0)
        assert first.spread == math.inf and first.num_short(8) == 0  # nothing is known

        def sample(num_tokens: int, status: Status) -> Sample:
            return Sample(tokens=[1] * (10 + num_tokens), response_length=num_tokens, status=status)

        first.count_longest([sample(n, Status.COMPLETED) for n in (50, 30, 10)])
        first.count_longest([sample(20, Status.TRUNCATED), sample(90, Status.ABORTED)])
        first.lengths.num_samples, first.lengths.num_tokens, first.lengths.num_prompt_tokens = 4, 150, 40
        second = execute.new_execution(args, 1)
        assert first.lengths.num_longest == 170 and second.spread == 170 / 110
        assert second.num_short(8) == 3  # 8 * (1 - 110 / 170) = 2.8
        execute._last()[False] = first.lengths
        first.lengths.num_longest = 450
        assert execute.new_execution(args, 2).num_short(8) == 0  # too wide
    finally:
        execute._last().clear()


def test_a_sample_for_whose_room_others_wait_asks_alone() -> None:
    async def main() -> None:
        room = KVBudget(2)
        await room.enter(2, 1.0)
        assert not room.is_crowded
        waits = asyncio.create_task(room.enter(1, 1.0))
        await asyncio.sleep(0)
        assert room.is_crowded
        room.leave(1.0)
        await waits
        assert not room.is_crowded

    asyncio.run(main())


def test_waiters_that_are_cancelled_with_a_leave_hear_of_the_cancellation() -> None:
    async def main() -> None:
        room = KVBudget(1)
        await room.enter(1, 1.0)
        waits = asyncio.create_task(room.enter(1, 1.0))
        await asyncio.sleep(0)
        waits.cancel()
        room.leave(1.0)  # in the same turn of the loop: it passes over whoever is cancelled
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert room.num_inside == 0 and not room.is_crowded

    asyncio.run(main())

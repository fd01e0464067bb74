"""The state of each of several runs in one process, and changes of the process that they share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from instep.data.messages import clock
from instep.engines import keys
from instep.errors import ConfigError
from instep.rollout import eval, execute, runtime
from instep.rollout.request_gate import gate
from instep.rollout.rewards import pool
from instep.system import spans
from instep.system.run_context import PerRun, RunContext, RunThreads, cached_per_run, carried, current
from instep.system.shared import shared_by_runs

number: PerRun[list[int]] = PerRun(list)


def in_plain_thread(work: Callable[[], object]) -> object:
    """What `work` returns or raises in a thread that no run has started."""
    found: list[object] = []

    def keep() -> None:
        try:
            found.append(work())
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join(60)
    return found[0]


def test_each_run_has_its_values_also_in_its_tasks_and_threads() -> None:
    one, two = RunContext(), RunContext()

    async def of_task() -> list[int]:
        return await asyncio.create_task(asyncio.sleep(0, number()))

    number().append(0)
    for run, value in ((one, 1), (two, 2)):
        with run.entered():
            number().append(value)
    for run, value in ((two, 2), (one, 1)):
        with run.entered(), RunThreads(1) as pool:
            assert number() == [value] == pool.submit(number).result(60) == asyncio.run(of_task())
            assert list(pool.map(lambda n: (n, number()[0]), "ab")) == [("a", value), ("b", value)]
            work = carried(number)
        assert in_plain_thread(work) == [value]
    assert number() == [0]
    number().clear()


def test_a_thread_without_a_run_works_for_the_open_one_and_for_none_of_several() -> None:
    one, two = RunContext(), RunContext()
    before = current()
    with one.opened():
        assert in_plain_thread(current) is one
        with two.opened():
            refused = in_plain_thread(current)
            assert isinstance(refused, ConfigError) and "2 runs are open" in refused.what
            with pytest.raises(ConfigError, match="this code works for none"):
                number()
        assert in_plain_thread(current) is one
    assert in_plain_thread(current) is before


def test_a_run_computes_a_cached_result_once() -> None:
    calls: list[str] = []
    read = cached_per_run(lambda name: calls.append(name) or f"{name} {len(calls)}")
    first, later = RunContext(), RunContext()
    with first.entered():
        assert read("a") == read("a") == "a 1"
    with later.entered():
        assert read("a") == "a 2"
    with first.entered():
        assert read("a") == "a 1" and calls == ["a", "a"]


def test_threads_that_ask_at_once_get_one_result() -> None:
    """Such as the owner of a lease: an engine refuses the renewals of another one."""
    start = threading.Barrier(4)

    @cached_per_run
    def made(name: str, *, last: int) -> object:
        time.sleep(0.01)  # another thread calls it meanwhile
        return object()

    def ask(_: int) -> object:
        start.wait(10)
        return made("owner", last=1)

    with RunContext().entered(), RunThreads(4) as threads:
        (one,) = set(threads.map(ask, range(4)))
        assert made("owner", last=1) is one is not made("owner", last=2)
        made.cache_clear()  # type: ignore[attr-defined]
        assert made("owner", last=1) is not one


def test_what_runs_share_ends_with_the_last_one() -> None:
    told: list[str] = []

    @shared_by_runs
    def change() -> Callable[[], None]:
        told.append("made")
        return lambda: told.append("undone")

    first, second = change(), change()
    first()
    assert told == ["made"]
    second()
    assert told == ["made", "undone"]
    change()()
    assert told == ["made", "undone"] * 2


def test_the_state_of_a_run_is_its_own() -> None:
    states = (
        gate,
        runtime.state,
        clock,
        keys.run_key,
        keys._known,
        execute._last,
        eval._loaded,
        pool._pools,
        spans._state,
    )
    found = []
    for run in (one := RunContext()), RunContext():
        with run.entered():
            gate().close()
            spans.start("here")
            found.append([state() for state in states])
    assert all(ours is not theirs for ours, theirs in zip(*found, strict=True)) and not gate().closed
    assert spans.now() is None and found[0][3] != found[1][3]
    with one.entered():
        assert gate().closed and spans.now() is not None and keys.run_key() == found[0][3]

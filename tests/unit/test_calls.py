"""Calls to a process that computes; either side ends with the other, so both are processes of their own here."""

import asyncio
import multiprocessing

import pytest

from instep.system.calls import Caller, CallQueue


class Refused(Exception):
    pass


class Broken(Exception):
    pass


def refuse():
    raise Refused("no")


def compute(pipe):
    """The other side. `swap` is answered when a second one has come, each with what the other brought."""
    waiting = []
    functions = {"add": lambda a, b: a + b, "refuse": refuse, "break": lambda: 1 // 0, "swap": waiting.append}
    queue = CallQueue(pipe, functions, Refused, Broken)
    while True:
        queue.work(idle=lambda: len(waiting) < 2)
        (first, a), (second, b) = waiting[:2]
        queue.answer([(first, b), (second, a)])
        del waiting[:2]


def served(scenario):
    """What `scenario(caller)` returns while the other process works."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=compute, args=(theirs,), daemon=True)
    process.start()

    async def run():
        return await asyncio.wait_for(scenario(Caller(ours)), 30)

    try:
        return asyncio.run(run())
    finally:
        process.kill()
        process.join(5)


def test_answers_find_their_calls():
    async def scenario(caller):
        return await asyncio.gather(*(caller.call("add", i, 1) for i in range(200)))

    assert served(scenario) == list(range(1, 201))


def test_a_refusal_comes_back_as_it_is_and_a_fault_by_name(capfd):
    async def scenario(caller):
        with pytest.raises(Refused, match="^no$"):
            await caller.call("refuse")
        with pytest.raises(Broken, match="^break failed: ZeroDivisionError: integer division"):
            await caller.call("break")
        return await caller.call("add", 1, 2)

    assert served(scenario) == 3
    assert "ZeroDivisionError" in capfd.readouterr().err  # with its stack


def test_an_answer_may_come_later_and_nobody_may_wait_for_it():
    async def scenario(caller):
        (first, abandoned), (second, late) = caller.expect(), caller.expect()
        caller.send("swap", (first, "a"))  # its own answer does not matter
        abandoned.cancel()
        caller.send("swap", (second, "b"))
        return await late, await caller.call("add", 0, 0)

    assert served(scenario) == ("a", 0)

"""HTTP against a server that misbehaves, and the background loop of the rollout's coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from instep.errors import EngineError, RewardError, RolloutError
from instep.rollout import http, runtime
from instep.rollout.client import complete, complete_n
from instep.types import Status, VersionSpan
from tests.bounds import allowed, until


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    runtime.state().listener = None
    runtime.shutdown()


# ---- HTTP, against a server that misbehaves --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/x", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/x"
    finally:
        await runner.cleanup()


def posted(answers: list[Any], **kwargs: Any) -> tuple[Any, int, float]:
    """`post` to a server that gives these answers (status, text) in turn; None closes the connection instead."""
    count = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal count
        answer = answers[min(count, len(answers) - 1)]
        count += 1
        if answer is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return web.Response(status=answer[0], text=answer[1])

    async def scenario() -> Any:
        async with serving(handler) as url:
            try:
                return await http.post(url, {"a": 1}, **kwargs)
            except EngineError as error:
                assert error.where == url and error.remedy
                return error

    start = time.monotonic()
    return runtime.run(scenario(), timeout=30), count, time.monotonic() - start


def test_post_tries_again_after_a_server_error() -> None:
    answer, count, seconds = posted([(503, "warming up"), None, (200, '{"ok": 1}')])
    assert answer == {"ok": 1} and count == 3
    assert seconds >= 0.6  # 0.2 + 0.4 of pause


def test_post_gives_up_after_its_retries_with_the_servers_words() -> None:
    error, count, _ = posted([(500, '{"error": {"message": "out of memory"}}')], max_retries=2)
    assert count == 3 and isinstance(error, EngineError)
    assert error.what == "3 attempts failed, the last with 500: out of memory"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "no such model"}}', "no such model"),
        ('{"detail": "no such model"}', "no such model"),
        ('{"error": "no such model"}', "no such model"),
        ("no such model", "no such model"),
    ],
)
def test_post_takes_a_refusal_as_final(body: str, words: str) -> None:
    error, count, _ = posted([(404, body)])
    assert count == 1
    assert isinstance(error, EngineError) and error.what == f"the request was refused with 404: {words}"


@pytest.mark.parametrize("body", ["<html>", "[1]", "3"])
def test_post_wants_an_object(body: str) -> None:
    error, count, _ = posted([(200, body)])
    assert count == 1 and isinstance(error, EngineError) and "JSON" in error.what


def test_post_of_an_empty_answer_and_from_a_foreign_loop() -> None:
    assert posted([(200, "")])[0] == {}

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"got": await request.json()})

    async def own_loop() -> Any:  # a hook that brings its own event loop
        async with serving(handler) as url:
            return await http.post(url, {"a": 1})

    assert asyncio.run(own_loop()) == {"got": {"a": 1}}


def test_an_answer_whose_parts_do_not_fit_is_refused() -> None:
    def completion(choice: dict[str, Any]) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.json_response({"choices": [choice]} if choice else {"other": 1})

        async def scenario() -> Any:
            async with serving(handler) as url:
                return await complete(url, "m", [1, 2], {"max_tokens": 2})

        return runtime.run(scenario(), timeout=20)

    content = [{"logprob": -0.5}, {"logprob": -1.5}]
    good = {"token_ids": [7, 8], "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None}
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    out = completion({**good, "weight_versions": spans})
    assert (out.token_ids, out.log_probs, out.status) == ([7, 8], [-0.5, -1.5], Status.TRUNCATED)
    assert out.weight_versions == [VersionSpan("3", 0, 1), VersionSpan("4", 1, 2)]
    assert completion(good).weight_versions == []  # an engine that does not say
    for reason, status in (("stop", "completed"), ("abort", "aborted"), ("cancelled", "aborted")):
        assert completion({**good, "finish_reason": reason}).status == Status(status)
    with pytest.raises(EngineError, match="2 tokens came with 1 log-probs"):
        completion({**good, "logprobs": {"content": content[:1]}})
    with pytest.raises(EngineError, match="do not cover 2 tokens"):
        completion({**good, "weight_versions": spans[:1]})
    with pytest.raises(EngineError, match="do not cover 2 tokens"):
        completion({**good, "weight_versions": spans[1:]})
    with pytest.raises(EngineError, match=r"does not have the form of 1 choices: {'other"):
        completion({})


# ---- the background loop ---------------------------------------------------------------------------------------------


def test_run_returns_raises_and_is_bounded() -> None:
    async def value() -> int:
        return 3

    async def fails() -> None:
        raise RewardError("bad")

    assert runtime.run(value()) == 3
    with pytest.raises(RewardError, match="bad"):
        runtime.run(fails())
    start = time.monotonic()
    with pytest.raises(RolloutError, match="not done after 0 s"):
        runtime.run(asyncio.sleep(30), timeout=0.2)
    assert time.monotonic() - start < allowed(1.5)


def test_run_on_its_own_thread_is_refused_instead_of_hanging() -> None:
    async def nested() -> None:
        runtime.run(asyncio.sleep(0))

    with pytest.raises(RolloutError, match="own thread"):
        runtime.run(nested(), timeout=10)


@pytest.mark.parametrize("error", [None, EngineError("engine 3 died")])
def test_cancel_all_reaches_every_caller(error: EngineError | None) -> None:
    begun, cancelled, failures = [], [], []

    async def long() -> None:
        begun.append(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    def caller() -> None:
        try:
            runtime.run(long())
        except EngineError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(begun) == 3)
    start = time.monotonic()
    runtime.cancel_all(error)
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - start < allowed(1)
    assert [f.what for f in failures] == [error.what if error else "the rollout was cancelled"] * 3
    runtime.run(asyncio.sleep(0), timeout=5)  # the loop goes on
    assert len(cancelled) == 3


def test_shutdown_can_be_repeated_and_the_loop_comes_back() -> None:
    closed = []

    async def closer() -> None:
        closed.append(1)

    runtime.run(asyncio.sleep(0))
    runtime.at_shutdown(closer)
    runtime.shutdown()
    runtime.shutdown()
    assert closed == [1]
    runtime.run(asyncio.sleep(0), timeout=5)
    assert closed == [1]


def test_a_coroutine_with_bounded_steps_behaves_as_any_other() -> None:
    async def inner() -> int:
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(5), 0.01)
        with pytest.raises(KeyError):
            await raising()
        return 4

    async def raising() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def outer() -> int:
        return await runtime.bounded_steps(inner(), 5, RewardError("blocked"))

    assert runtime.run(outer(), timeout=10) == 4

    async def cancelled() -> str:
        task = asyncio.ensure_future(runtime.bounded_steps(asyncio.sleep(60), 5, RewardError("blocked")))
        await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "not"

    assert runtime.run(cancelled(), timeout=10) == "cancelled"


def test_gather_cancels_the_others_at_the_first_failure() -> None:
    events = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("ended")

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise RewardError("bad")

    async def both() -> None:
        try:
            await runtime.gather([long(), fails(), long()])
        finally:
            events.append("left")

    with pytest.raises(RewardError):
        runtime.run(both(), timeout=10)
    assert events == ["ended", "ended", "left"]


def test_an_engine_that_runs_fewer_at_once_is_asked_one_by_one() -> None:
    asked: list[tuple[int, int]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        params = (await request.json())["sampling_params"]
        asked.append((params["seed"], params.get("n", 1)))
        if params.get("n", 1) > 2:
            return web.json_response({"error": {"message": "sampling_params.n must be at most 2"}}, status=400)
        choice = {"token_ids": [params["seed"]], "logprobs": {"content": [{"logprob": -1.0}]}}
        return web.json_response({"choices": [choice]})

    async def scenario() -> Any:
        async with serving(handler) as url:
            return [one.token_ids for one in await complete_n(url, "m", [1, 2], {"seed": 5}, 3)]

    assert runtime.run(scenario(), timeout=30) == [[5], [6], [7]]
    assert asked[0] == (5, 3) and sorted(asked[1:]) == [(5, 1), (6, 1), (7, 1)]

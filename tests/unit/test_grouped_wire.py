"""Requests that begin together become one, whatever becomes of it: everybody gets what he would get alone."""

import asyncio
from typing import Any

import pytest

from instep.engines.grouped_wire import MAX_TOGETHER, GroupedWire
from instep.engines.wire import Completion, GenerationRequest
from instep.errors import EngineError


class Engine:
    """Answers with the seed as the token."""

    def __init__(self, fails: bool = False, hangs: bool = False):
        self.wire, self.requests, self.cancelled = GroupedWire(), [], 0
        self.fails, self.hangs = fails, hangs

    async def send(self, payload: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        params = payload["sampling_params"]
        self.requests.append((params.get("seed"), params.get("n", 1)))
        try:
            await asyncio.sleep(100 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise EngineError("no", where="url")
        seeds = range(params.get("seed", 0), params.get("seed", 0) + params.get("n", 1))
        return {"choices": [{"token_ids": [s], "logprobs": {"content": [{"logprob": -1.0}]}} for s in seeds]}, None

    def ask(self, seed: int | None, prompt: tuple[int, ...] = (1, 2), **params: Any) -> asyncio.Task[Completion]:
        given = params if seed is None else {**params, "seed": seed}
        return asyncio.create_task(self.wire.complete(GenerationRequest("url", "m", prompt, given, "s"), self.send))


async def tokens(*tasks: asyncio.Task[Completion]) -> list[int]:
    return [completion.token_ids[0] for completion in await asyncio.gather(*tasks)]


def test_consecutive_seeds_of_one_prompt_are_one_request():
    async def main() -> None:
        engine = Engine()
        asked = [engine.ask(seed) for seed in (7, 5, 6, 9, 6)]
        others = [engine.ask(8, (3,)), engine.ask(8, top_p=0.5), engine.ask(None)]
        assert await tokens(*asked, *others) == [7, 5, 6, 9, 6, 8, 8, 0]
        assert sorted(engine.requests, key=str) == [(5, 3), (8, 1), (8, 1), (9, 1), (None, 1)]
        engine.requests.clear()
        assert await tokens(engine.ask(1)) + await tokens(engine.ask(2)) == [1, 2]  # one after the other
        assert engine.requests == [(1, 1), (2, 1)]
        engine.requests.clear()
        assert await tokens(*(engine.ask(seed) for seed in range(MAX_TOGETHER + 6))) == list(range(MAX_TOGETHER + 6))
        assert engine.requests == [(0, MAX_TOGETHER), (MAX_TOGETHER, 6)]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_error_reaches_everybody():
    async def main() -> None:
        engine = Engine(fails=True)
        found = await asyncio.gather(*(engine.ask(seed) for seed in range(3)), return_exceptions=True)
        assert engine.requests == [(0, 3)] and all(isinstance(error, EngineError) for error in found)

    asyncio.run(main())


def test_a_request_is_cancelled_when_nobody_waits_for_it():
    async def main() -> None:
        engine = Engine(hangs=True)
        asked = [engine.ask(seed) for seed in range(3)]
        await asyncio.sleep(0.01)
        for task in asked[:2]:
            task.cancel()
        await asyncio.sleep(0.01)
        assert engine.requests == [(0, 3)] and not engine.cancelled and not asked[2].done()
        asked[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[2]
        await asyncio.sleep(0.01)
        assert engine.cancelled == 1

    asyncio.run(main())


def test_what_vllm_refuses_together_is_asked_alone():
    """Several responses of one greedy request, and more of one request than it runs at once."""

    async def main() -> None:
        engine = Engine()
        assert await tokens(*(engine.ask(seed, temperature=0.0) for seed in range(3))) == [0, 1, 2]
        assert engine.requests == [(0, 1), (1, 1), (2, 1)]
        engine.requests.clear()
        send = engine.send

        async def few(payload: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
            if payload["sampling_params"].get("n", 1) > 2:
                engine.requests.append("refused")
                raise EngineError("answered 400: sampling_params.n must be at most 2", where="url")
            return await send(payload)

        engine.send = few
        assert await tokens(*(engine.ask(seed) for seed in range(3))) == [0, 1, 2]
        assert engine.requests == ["refused", (0, 1), (1, 1), (2, 1)]

    asyncio.run(asyncio.wait_for(main(), 10))

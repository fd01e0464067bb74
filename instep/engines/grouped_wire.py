"""vLLM's wire format with the requests of a group joined into one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from instep.engines.wire import Completion, GenerationRequest, Send, WireFormat
from instep.errors import EngineError

MAX_TOGETHER = 64  # responses of one request
GREEDY = 1e-5  # the temperature below which vLLM takes the most probable token


@dataclass
class _Turn:
    """The requests of one turn of the event loop for one prompt with one set of parameters.

    Attributes:
        request: the first of them; params: its sampling parameters without the seed.
        waiting: by seed the futures of those who want that response.
        requests: the joined requests by their first seed, once the turn is over.
    """

    request: GenerationRequest
    params: dict[str, Any]
    send: Send
    waiting: dict[int, list[asyncio.Future[Completion]]] = field(default_factory=dict)
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def first_of(self, seed: int) -> int:
        """The first seed of the joined request that `seed` belongs to."""
        first = seed
        while first - 1 in self.waiting:
            first -= 1
        return first + (seed - first) // MAX_TOGETHER * MAX_TOGETHER

    def seeds_from(self, first: int) -> range:
        """The seeds of the joined request that begins with `first`."""
        together = range(1, MAX_TOGETHER + 1)
        return range(first, first + next(n for n in together if n == MAX_TOGETHER or first + n not in self.waiting))


def may_be_several(sampling_params: dict[str, Any]) -> bool:
    """Whether one request may be for several responses: vLLM refuses it where it takes the most probable token."""
    return bool(sampling_params.get("temperature", 1.0) >= GREEDY)


class GroupedWire(WireFormat):
    """Joins requests for the same prompt with the same parameters and consecutive seeds into one.

    The requests of a group are such: they begin in the same turn of the event loop. Client and engine then make, parse
    and answer one request instead of n; response i is sampled with `seed + i`, so that it is the same as alone.
    """

    def __init__(self) -> None:
        self._turns: dict[Hashable, list[_Turn]] = {}

    async def complete(self, request: GenerationRequest, send: Send) -> Completion:
        params = dict(request.sampling_params)
        seed = params.pop("seed", None)
        if seed is None or request.alone or not may_be_several(params):
            return await super().complete(request, send)
        loop = asyncio.get_running_loop()
        key = (loop, request.url, request.model, request.session, tuple(request.token_ids))
        turns = self._turns.setdefault(key, [])
        if (turn := next((turn for turn in turns if turn.params == params), None)) is None:
            turns.append(turn := _Turn(request, params, send))
            if len(turns) == 1:
                loop.call_soon(self._end, key)  # when all requests of this turn have come
        answer = loop.create_future()
        turn.waiting.setdefault(seed, []).append(answer)
        try:
            return await answer
        finally:
            if answer.cancelled():
                self._left(turn, turn.first_of(seed))

    def _end(self, key: Hashable) -> None:
        for turn in self._turns.pop(key):
            for first in sorted({turn.first_of(seed) for seed in turn.waiting}):
                answer = self._answer(turn, turn.seeds_from(first))
                turn.requests[first] = asyncio.get_running_loop().create_task(answer)
                self._left(turn, first)

    async def _answer(self, turn: _Turn, seeds: range) -> None:
        waiting = [(i, answer) for i, seed in enumerate(seeds) for answer in turn.waiting[seed]]
        try:
            first = replace(turn.request, sampling_params={**turn.params, "seed": seeds[0]})
            completions = await self.complete_group(first, len(seeds), turn.send)
        except asyncio.CancelledError:
            for _, answer in waiting:
                answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it is raised to everybody who waits
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for i, answer in waiting:
            if not answer.done():
                answer.set_result(completions[i])

    async def complete_group(self, request: GenerationRequest, n: int, send: Send) -> list[Completion]:
        """`complete_n`, by one request each where the engine runs fewer at once (--vllm-max-num-seqs), and refuses."""
        try:
            return await self.complete_n(request, n, send)
        except EngineError as error:
            if n == 1 or "sampling_params.n" not in error.what:
                raise
        given = request.sampling_params
        alone = [replace(request, sampling_params={**given, "seed": given["seed"] + i}) for i in range(n)]
        return [one for (one,) in await asyncio.gather(*(self.complete_n(r, 1, send) for r in alone))]

    def _left(self, turn: _Turn, first: int) -> None:
        """Cancel a joined request for which nobody waits any more."""
        left = all(answer.cancelled() for seed in turn.seeds_from(first) for answer in turn.waiting[seed])
        if left and first in turn.requests:
            turn.requests[first].cancel()

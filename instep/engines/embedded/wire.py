"""The embedded engine's wire format: vLLM's, with the requests of a group joined into one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from instep.engines.wire import Completion, GenerationRequest, Send, WireFormat

MAX_TOGETHER = 64  # responses of one request


@dataclass
class _Turn:
    """The requests of one turn of the event loop for one prompt with one set of parameters.

    Attributes:
        requests: the joined requests by their first seed; waiting: how many responses of each are waited for.
    """

    seeds: set[int] = field(default_factory=set)
    requests: dict[int, asyncio.Task[list[Completion]]] = field(default_factory=dict)
    waiting: Counter[int] = field(default_factory=Counter)


class GroupedWire(WireFormat):
    """Joins requests for the same prompt with the same parameters and consecutive seeds into one.

    The requests of a group are such: they begin in the same turn of the event loop. The engine then parses, prefills
    and answers once instead of n times; response i is sampled with `seed + i`, so that it is the same as alone.
    """

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn] = {}

    async def complete(self, request: GenerationRequest, send: Send) -> Completion:
        params = dict(request.sampling_params)
        seed = params.pop("seed", None)
        if seed is None:
            return await super().complete(request, send)
        where = (asyncio.get_running_loop(), request.url, request.model, request.session)
        key = (*where, tuple(request.token_ids), json.dumps(params, sort_keys=True))
        turn = self._turns.setdefault(key, _Turn())
        turn.seeds.add(seed)
        await asyncio.sleep(0)  # until all requests of this turn have come
        if self._turns.get(key) is turn:
            del self._turns[key]
        first = seed
        while first - 1 in turn.seeds:
            first -= 1
        first += (seed - first) // MAX_TOGETHER * MAX_TOGETHER
        if first not in turn.requests:
            n = next(n for n in range(1, MAX_TOGETHER + 1) if n == MAX_TOGETHER or first + n not in turn.seeds)
            one = replace(request, sampling_params={**params, "seed": first})
            turn.requests[first] = asyncio.create_task(self.complete_n(one, n, send))
        turn.waiting[first] += 1
        try:
            return (await asyncio.shield(turn.requests[first]))[seed - first]
        finally:
            turn.waiting[first] -= 1
            if not turn.waiting[first]:
                turn.requests[first].cancel()  # it is done, or nobody waits for it any more

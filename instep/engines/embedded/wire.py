"""The embedded engine's wire format: vLLM's, where requests that can be made together are made together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable
from dataclasses import replace

from instep.engines.wire import Completion, GenerationRequest, Send, WireFormat

MAX_TOGETHER = 64  # responses of one request
_Waiting = list[tuple[int, asyncio.Future[Completion]]]  # a seed, and who waits for its response


class GroupedWire(WireFormat):
    """Makes one request of those for the same prompt with the same parameters and consecutive seeds.

    These are a group's, which begin in the same turn of the event loop. The engine then parses, prefills and answers
    once instead of n times; response i draws with `seed + i`, so that each is what it would be alone.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Waiting] = {}  # of this turn of a loop

    async def complete(self, request: GenerationRequest, send: Send) -> Completion:
        params, loop = dict(request.sampling_params), asyncio.get_running_loop()
        seed = params.pop("seed", None)
        if seed is None:
            return await super().complete(request, send)
        words = json.dumps(params, sort_keys=True)
        key = (loop, request.url, request.model, request.session, tuple(request.token_ids), words)
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(lambda: self._begin(self._waiting.pop(key), request, send))  # when all of this turn are here
        response: asyncio.Future[Completion] = loop.create_future()
        self._waiting[key].append((seed, response))
        return await response

    def _begin(self, waiting: _Waiting, request: GenerationRequest, send: Send) -> None:
        """One request for each run of consecutive seeds."""
        waiting.sort(key=lambda entry: entry[0])
        while waiting:
            first = waiting[0][0]
            count = 1
            while count < min(len(waiting), MAX_TOGETHER) and waiting[count][0] == first + count:
                count += 1
            mine, waiting = waiting[:count], waiting[count:]
            one = replace(request, sampling_params={**request.sampling_params, "seed": first})
            task = asyncio.ensure_future(self.complete_n(one, count, send))
            _connect(task, [response for _, response in mine])


def _connect(task: asyncio.Task[list[Completion]], responses: list[asyncio.Future[Completion]]) -> None:
    """The outcome of `task` goes to all `responses`; it is cancelled when nobody waits for any of them any more."""

    def give(task: asyncio.Task[list[Completion]]) -> None:
        error = None if task.cancelled() else task.exception()
        for i, response in enumerate(responses):
            if response.done():
                continue
            if task.cancelled():
                response.cancel()
            elif error is not None:
                response.set_exception(error)
            else:
                response.set_result(task.result()[i])

    def look(response: asyncio.Future[Completion]) -> None:
        if all(other.cancelled() for other in responses):
            task.cancel()

    task.add_done_callback(give)
    for response in responses:
        response.add_done_callback(look)

"""The room that engines have for samples that are generated at once.

A vLLM engine starts every request whose prompt fits into its KV cache. When the responses outgrow the cache, it drops
some of them and computes their tokens again later. This costs up to half of its throughput (docs/performance.md). So a
rollout sends only as much as is expected to fit; the rest waits here.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import NamedTuple

# At once: as many as vLLM runs by default on a large GPU. An engine queues the requests that it cannot run.
SAMPLES_PER_ENGINE = 1024


class _Turn(NamedTuple):
    """Samples that wait for room together."""

    num_samples: int
    tokens: float
    come: asyncio.Future[None]


class KVBudget:
    """Admits groups in order, as soon as there is room for all samples of a group. Samples leave one by one.

    A group of any size comes in when no other one is inside.

    Args:
        num_samples: how many may be inside at once.
        num_tokens: the bound of the expected tokens of the samples inside, prompts and responses.
    """

    def __init__(self, num_samples: int, num_tokens: float = math.inf):
        self._num_samples, self._num_tokens = num_samples, num_tokens
        self._waiting: deque[_Turn] = deque()
        self.num_inside, self.tokens_inside = 0, 0.0

    @property
    def is_crowded(self) -> bool:
        """Return whether a group waits."""
        return bool(self._waiting)

    async def enter(self, num_samples: int, tokens: float) -> None:
        """Wait until `num_samples` samples of `tokens` expected tokens each are inside."""
        if not self._waiting and self._fits(num_samples, tokens):
            self._take(num_samples, tokens)
            return
        turn = _Turn(num_samples, tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():  # its turn came in the meantime
                self._take(-num_samples, tokens)
            elif turn in self._waiting:  # else `_call` has skipped it
                self._waiting.remove(turn)
            self._call()
            raise

    def leave(self, tokens: float, num_samples: int = 1) -> None:
        """Let samples out that came in with `tokens` each. A negative number lets them back in without a wait."""
        self._take(-num_samples, tokens)
        self._call()

    def _fits(self, num_samples: int, tokens: float) -> bool:
        in_tokens = self.tokens_inside + num_samples * tokens <= self._num_tokens
        return not self.num_inside or (self.num_inside + num_samples <= self._num_samples and in_tokens)

    def _take(self, num_samples: int, tokens: float) -> None:
        self.num_inside += num_samples
        self.tokens_inside += num_samples * tokens

    def _call(self) -> None:
        while self._waiting and self._fits(self._waiting[0].num_samples, self._waiting[0].tokens):
            turn = self._waiting.popleft()
            if not turn.come.done():  # else it was cancelled
                self._take(turn.num_samples, turn.tokens)
                turn.come.set_result(None)

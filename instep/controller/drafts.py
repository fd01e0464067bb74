"""How much of what the engines draft they take, with speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from instep.engines.engine import Engine

ASK_SECONDS = 10.0


class AcceptedDrafts:
    """The metric of a run's steps."""

    def __init__(self) -> None:
        self._before = 0.0, 0.0  # drafted and taken tokens

    def take(self, engines: Sequence[Engine]) -> dict[str, float]:
        """Return `perf/accepted_drafts`: the share of the tokens drafted since the last call; nothing without any."""
        told = [engine.kind.drafts(engine, ASK_SECONDS) for engine in engines]
        drafted, taken = (sum(counts[i] for counts in told) for i in range(2))
        before, self._before = self._before, (drafted, taken)
        new = drafted - before[0]  # an engine that was started again counts from 0
        return {"perf/accepted_drafts": (taken - before[1]) / new} if new > 0 else {}

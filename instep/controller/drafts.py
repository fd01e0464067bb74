"""The share of drafted tokens that the engines accept, with speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from instep.engines.engine import Engine

ASK_SECONDS = 10.0


class AcceptedDrafts:
    """The metric of a run's steps."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}  # drafted and taken tokens, by engine

    def take(self, engines: Sequence[Engine]) -> dict[str, float]:
        """Return `perf/accepted_drafts`: the share of the tokens drafted since the last call; nothing without any."""
        drafted = taken = 0.0
        for engine in engines:
            now, before = engine.kind.drafts(engine, ASK_SECONDS), self._before.get(engine.url, (0.0, 0.0))
            self._before[engine.url] = now
            if now[0] >= before[0]:  # an engine that was started again counts from 0
                drafted, taken = drafted + now[0] - before[0], taken + now[1] - before[1]
        return {"perf/accepted_drafts": taken / drafted} if drafted > 0 else {}

"""A mixture's own choices of experts, kept from the pass for old log-probs until the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from instep.arguments.settings import AlgorithmSettings
from instep.training.backend import Role
from instep.types import TokenBatch

CHOSEN = "chosen_experts"  # a sample column: layer -> the choices of this rank, `[num_tokens of the rank, top_k]`


class OwnChoices:
    """The choices that --use-routing-replay keeps of one rollout; replayed choices of the engine take precedence."""

    def __init__(self, args: AlgorithmSettings, role: Role):
        self._active = role == "actor" and bool(args.use_routing_replay and not args.use_rollout_routing_replay)
        self._kept: list[dict[int, Tensor]] = []

    def noting(self, parts: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Return the micro-batches of all steps; scoring keeps the experts that they choose."""
        self._kept = [{} for _ in parts] if self._active else []
        return _with(parts, self._kept)

    def replayed(self, parts: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Return the micro-batches of the next step with their kept choices; unchanged if they were not scored."""
        now, self._kept = self._kept[: len(parts)], self._kept[len(parts) :]
        return _with(parts, now)


def _with(parts: Sequence[TokenBatch], kept: Sequence[dict[int, Tensor]]) -> list[TokenBatch]:
    if not kept:
        return list(parts)
    return [
        replace(part, sample_columns={**part.sample_columns, CHOSEN: chosen})
        for part, chosen in zip(parts, kept, strict=True)
    ]

"""An optimizer step that starts before all of its samples are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from instep.training.backend import LossOutput, TrainBackend
from instep.training.gap import FreshGap


@dataclass
class BegunStep:
    """The gradients of some samples, which the backend holds, and the sums of their losses.

    Attributes:
        token: identifies the step; a repeated step has another one.
        gap: of the tokens so far.
        outputs: of the micro-batches so far; empty except on the last pipeline stage.
    """

    token: str
    gap: FreshGap | None
    outputs: list[LossOutput] = field(default_factory=list)

    def scale(self, backend: TrainBackend, factor: float) -> None:
        """Multiply gradients and sums by `factor`; maxima do not change."""
        backend.scale_gradients(factor)
        for out in self.outputs:
            out.sums = {name: value * factor for name, value in out.sums.items()}

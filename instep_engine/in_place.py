"""An engine whose weights are in memory that a trainer writes into (`memory.py`). Nothing is loaded in its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from instep_engine.manifest import WeightMismatch
from instep_engine.memory import Ranges, Sample, Slice
from instep_engine.receiving import Receiving


class InPlace(Receiving):
    """Compares what a trainer sends with the memory of this worker.

    Attributes:
        model: the engine computes with its parameters.
        slices: the places of the checkpoint's weights in them, by name; sample: of these slices.
    """

    model: nn.Module
    slices: dict[str, list[Slice]]
    sample: Sample

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Compare a whole checkpoint with the memory, and return its names; nothing is loaded."""
        if exact:
            what = "this engine shares its memory: it loads no buckets (--weight-sync single-copy)"
            raise WeightMismatch(what, next(iter(self.slices)))
        for name, whole in tensors.items():
            for part in self.slices.get(name, ()):
                if not torch.equal(part.view, part.held(whole)):
                    raise WeightMismatch(f"{name} of the checkpoint is not what this engine holds", name)
        return tensors

    def _check_complete(self, names: Iterable[str] | None) -> None:
        if missing := sorted(set(names or ()) - self.delivered):
            raise WeightMismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])

    def compare_samples(self, told: Mapping[str, str]) -> None:
        """Compare digests of samples with the memory. Raises WeightMismatch: other memory or values were written."""
        if missing := sorted(self.slices.keys() - told.keys()):
            raise WeightMismatch(f"{missing[0]} was not written", missing[0])
        live, held = Ranges(self.model.parameters()), self.sample.digests()
        for name, parts in self.slices.items():
            if any(live.holding(part.view.data_ptr()) is None for part in parts):
                raise WeightMismatch(f"this engine computes with other memory than what {name} was written to", name)
            if held[name] != told[name]:
                raise WeightMismatch(f"{name} is not what the trainer has written", name)

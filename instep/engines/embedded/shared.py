"""An engine whose weights are in memory that the trainer writes into (`--weight-sync single-copy`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from instep.engines.embedded.weights import LiveWeights
from instep.engines.kind import SHARED_MEMORY_REMEDY
from instep.errors import EngineError
from instep.system.processes import pulse
from instep.weights.memory import sample_digest
from instep_engine.manifest import WeightMismatch, dtype_name
from instep_engine.memory import CannotShare, Slice, move, write_manifest
from instep_engine.place import check_memory_folder


class SharedWeights(LiveWeights):
    """Live parameters in one file in shared memory; the manifest beside it has their places (`weights/memory.py`).

    Args:
        checkpoint: the model's folder.
        folder: a folder of the run, as `place.py` requires.

    Raises:
        NoPlace, OSError: it is not such a folder.
        EngineError: there is no room for the weights.
        ValueError: a weight of the checkpoint is not one piece in the model.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Path, folder: Path):
        super().__init__(model, checkpoint)
        check_memory_folder(str(folder))
        if fused := [group.checkpoint[0] for group in self.names.groups if group.converter is not None]:
            raise ValueError(f"{fused[0]} is a part of another tensor here: use --weight-sync shm")
        self.shared = {group.checkpoint[0]: self.weights[group.model[0]] for group in self.names.groups}
        try:
            memory = move(self.shared.values(), folder, 0)
        except CannotShare as error:
            raise EngineError(str(error), where=str(folder), remedy=SHARED_MEMORY_REMEDY) from error
        slices = {name: [Slice(p.detach(), 0, p.stride())] for name, p in self.shared.items()}
        shapes = {name: p.shape for name, p in self.shared.items()}
        about = {"architecture": type(model).__name__, "dtype": dtype_name(model.dtype), "num_ranks": 1}
        self.nonce = write_manifest(folder, 0, about, [memory], slices, shapes, lambda: None)

    def compare_samples(self, told: Mapping[str, str]) -> None:
        for name, parameter in self.shared.items():
            pulse()
            if told.get(name) != sample_digest(parameter):
                raise WeightMismatch(f"{name} is not what the trainer has written", name)

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Compare a checkpoint with the parameters, and return the names of its tensors."""
        if exact:
            what = "this engine shares its memory: it loads no buckets (--weight-sync single-copy)"
            raise WeightMismatch(what, next(iter(tensors), None))
        for name, tensor in tensors.items():
            pulse()
            parameter = self.shared.get(name)
            if name in self.aliases:
                continue
            if parameter is None or not torch.equal(parameter, tensor.to(parameter.dtype)):
                raise WeightMismatch(f"{name} of the checkpoint is not what this engine holds", name)
        return tensors

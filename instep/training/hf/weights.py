"""Weights of a Hugging Face model: iterate over full tensors under a checkpoint's names, and load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from instep.checkpoints.hf_weights import opened_weights
from instep.errors import CheckpointError
from instep.models.checkpoint_names import CheckpointNames, Group, named_weights
from instep.models.images import image_names
from instep.training.hf.gather import in_batches
from instep.training.hf.shards import write
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec

Addition = Callable[[str], Tensor | None]
Groups = list[tuple[Group, list[TensorSpec]]]


class HfWeightSource(WeightSource):
    """A `WeightSource` over a plain or a sharded model. Rank 0 emits; the others take part in the gathering.

    Parameters are sent as `dtype`, the trainer's type; buffers unchanged. `more` returns what is added to the weight of
    a name, in float32, or None; collective.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, names: CheckpointNames, more: Addition = lambda name: None
    ):
        self._weights, self._names, self._more = named_weights(model), names, more
        self.emits = dist.get_rank() == 0
        self._groups = []
        for group in names.groups:
            kind, named = self._dtype(group, dtype), zip(group.checkpoint, group.shapes, strict=True)
            self._groups.append((group, [TensorSpec(name, shape, kind) for name, shape in named]))
        self.specs = [spec for _, specs in self._groups for spec in specs]

    def _dtype(self, group: Group, dtype: torch.dtype) -> torch.dtype:
        weight = self._weights[group.model[0]]
        return dtype if isinstance(weight, nn.Parameter) and weight.is_floating_point() else weight.dtype

    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        return self._gathered(self._groups)

    def _gathered(self, groups: Groups) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        wanted = [(self._weights[name], specs[0].dtype) for group, specs in groups for name in group.model]
        gathered = in_batches(wanted, self.emits)
        for group, specs in groups:
            full = {}
            for name in group.model:
                weight, more = next(gathered), self._more(name)
                if weight is not None:
                    full[name] = weight if more is None else (weight.float() + more).to(weight.dtype)
            tensors = self._names.to_checkpoint(group, full) if self.emits else [None] * len(specs)
            yield from zip(specs, tensors, strict=True)


@torch.no_grad()
def load_hf(model: PreTrainedModel, path: Path, *, fresh: str | None = None) -> list[str]:
    """Copy a checkpoint's weights into `model`, each rank its own shard, without communication.

    Args:
        fresh: the name of a weight that keeps its value, even if the checkpoint has it.

    Returns:
        The names of the tensors of multi-token prediction and of layers for images, which are not read.

    Raises:
        CheckpointError, ConfigError: a file is missing or unreadable, or a weight is missing, unexpected or of another
            shape.
    """
    weights = named_weights(model)
    with opened_weights(path, model.dtype) as stored:
        names = CheckpointNames(model, stored)
        if missing := [name for name in names.missing if name != fresh]:
            raise _mismatch(path, f"{len(missing)} weights are missing, the first {missing[0]!r}")
        if names.extra:
            raise _mismatch(path, f"{len(names.extra)} weights are not of the model, the first {names.extra[0]!r}")
        for group in (group for group in names.groups if group.model != [fresh]):
            tensors = [stored[name].read() for name in group.checkpoint]
            for name, shape, tensor in zip(group.checkpoint, group.shapes, tensors, strict=True):
                if tensor.shape != shape:
                    raise _mismatch(path, f"{name!r} is {list(tensor.shape)} there and {list(shape)} in the model")
            for name, full in names.to_model(group, tensors).items():
                write(weights[name], full)
    return [*names.mtp, *image_names(stored)]


def _mismatch(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), remedy="give the checkpoint that belongs to this model's config.json")

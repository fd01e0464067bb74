"""Weights of a Hugging Face model: names, full tensors one after another, loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from instep.checkpoints.weight_files import opened, weight_files
from instep.errors import CheckpointError
from instep.weights.source import TensorSpec


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `save_pretrained` would write, under its names: parameters and persistent buffers, tied ones once."""
    seen: set[int] = set()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            out[name] = tensor
    return out


class HfWeightSource:
    """A `WeightSource` over a plain or a sharded model. Rank 0 emits; the others take part in the gathering."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._weights = named_weights(model)
        self.emits = dist.get_rank() == 0
        self.specs = [
            TensorSpec(name, tuple(w.shape), dtype if w.is_floating_point() else w.dtype)
            for name, w in self._weights.items()
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        for spec, weight in zip(self.specs, self._weights.values(), strict=True):
            local = weight.detach()
            if isinstance(local, DTensor):
                local = local.to(spec.dtype).full_tensor()  # cast first: half the bytes on the wire
            yield spec, local.to(spec.dtype) if self.emits else None


@torch.no_grad()
def load_hf(model: nn.Module, path: Path, *, fresh: str | None = None) -> None:
    """Copy a checkpoint's weights into `model`, each rank its own shard, with no communication.

    Args:
        fresh: the name of a weight that keeps its value, whether the checkpoint has it or not.

    Raises:
        CheckpointError: a missing or unreadable file, a weight missing, unexpected or of another shape.
    """
    weights = named_weights(model)
    ignored = set(model.state_dict()) - set(weights)
    if fresh is not None:
        del weights[fresh]
        ignored.add(fresh)
    places = weight_files(path)
    if missing := sorted(set(weights) - set(places)):
        raise _mismatch(path, f"{len(missing)} weights are missing, the first {missing[0]!r}")
    if extra := sorted(set(places) - set(weights) - ignored):
        raise _mismatch(path, f"{len(extra)} weights are not the model's, the first {extra[0]!r}")
    for file in sorted({places[name] for name in weights}):
        with opened(file) as tensors:
            for name in (n for n in weights if places[n] == file):
                _copy(weights[name], tensors.get_tensor(name), name, path)


def _copy(weight: Tensor, full: Tensor, name: str, path: Path) -> None:
    if weight.shape != full.shape:
        raise _mismatch(path, f"{name!r} is {list(full.shape)} there and {list(weight.shape)} in the model")
    if isinstance(weight, DTensor):
        full = full.to(weight.device, weight.dtype)
        full = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(full)


def _mismatch(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), remedy="give the checkpoint that belongs to this model's config.json")

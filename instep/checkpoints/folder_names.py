"""The names of a decoder's tensors in a Hugging Face folder, where they differ from those of `models.weight_map`.

Some language models, such as Qwen3.5, are published with layers for images. Their prefix is `model.language_model.`.
Published mixtures of this kind hold a layer's experts in two tensors, as transformers 5 does: `experts.gate_up_proj`
`[experts, 2 ffn, hidden]` and `experts.down_proj` `[experts, hidden, ffn]`. In layers of multi-token prediction Qwen3.5
has them one by one, Qwen3.6 as in the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from instep.checkpoints.hf_weights import StoredTensor
from instep.checkpoints.weight_files import weight_files
from instep.models.files import tensor_files
from instep.models.images import IMAGES
from instep.weights.spec import TensorSpec

INNER = "model.language_model."
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_STACKED = re.compile(rf"((model|mtp)\..*\.experts)\.({_GATE_UP}|{_DOWN})")
_EXPERT = re.compile(r"((model|mtp)\..*\.experts)\.\d+\.(gate|up|down)_proj\.weight")
Named = Iterable[tuple[TensorSpec, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class OfExpert(StoredTensor):
    """A matrix of the expert `index` in a tensor of all experts: its rows from `first` on."""

    index: int
    first: int

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        ranges = [(0, size) for size in self.shape]
        ranges[dim] = (start, self.shape[dim] if stop is None else stop)
        (top, bottom), (left, right) = ranges
        part: Tensor = self.file.get_slice(self.name)[self.index, self.first + top : self.first + bottom, left:right]
        return part


@dataclass(frozen=True)
class FolderNames:
    """Attributes:
    prefix: replaces `model.`.
    stacked: where the experts of a layer are in two tensors: model, mtp (Qwen3.6), both or nowhere.
    """

    prefix: str = "model."
    stacked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, folder: Path) -> FolderNames:
        """Return the names of a folder, or the default if it has no weights. Raises CheckpointError."""
        names = list(weight_files(folder)) if tensor_files(folder) else []
        prefix = INNER if any(name.startswith(INNER) for name in names) else "model."
        return cls(prefix, frozenset(found[2] for name in names if (found := _STACKED.fullmatch(name))))

    def specs(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Return what the folder has for tensors of `weight_map`, experts in order."""
        return [spec for spec, _ in self.tensors((spec, None) for spec in specs)]

    def tensors(self, named: Named) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        """Yield the folder's tensors, made of those of `weight_map`. Stacked experts wait until their layer ends."""
        for layer, some in groupby(named, self._experts_of):
            if not layer:
                yield from map(self._renamed, some)
                continue
            parts = list(some)
            down = [part for part in parts if part[0].name.endswith(f"{_DOWN}.weight")]
            gate_up = [part for part in parts if not part[0].name.endswith(f"{_DOWN}.weight")]
            del parts
            yield self._renamed(_stack(f"{layer}.{_GATE_UP}", gate_up))
            yield self._renamed(_stack(f"{layer}.{_DOWN}", down))

    def _experts_of(self, named: tuple[TensorSpec, Tensor | None]) -> str:
        """Return the layer whose experts are in one tensor with this one; else an empty text."""
        found = _EXPERT.fullmatch(named[0].name) if self.stacked else None
        return found[1] if found and found[2] in self.stacked else ""

    def _renamed(self, named: tuple[TensorSpec, Tensor | None]) -> tuple[TensorSpec, Tensor | None]:
        spec, tensor = named
        name = f"{self.prefix}{spec.name.removeprefix('model.')}" if spec.name.startswith("model.") else spec.name
        return TensorSpec(name, spec.shape, spec.dtype), tensor


PLAIN = FolderNames()


def _stack(name: str, parts: list[tuple[TensorSpec, Tensor | None]]) -> tuple[TensorSpec, Tensor | None]:
    """Return one tensor of all experts: gate and up follow each other, for one expert after the other."""
    first = parts[0][0]
    each = 2 if name.endswith(_GATE_UP) else 1
    shape = (len(parts) // each, each * first.shape[0], *first.shape[1:])
    tensors = [tensor for _, tensor in parts if tensor is not None]
    whole = torch.cat(tensors).view(shape) if tensors else None
    return TensorSpec(name, shape, first.dtype), whole


def plain_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a folder's tensors under the names of `weight_map`, without layers for images."""
    plain: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        known = f"model.{name.removeprefix(INNER)}" if name.startswith(INNER) else name
        if (found := _STACKED.fullmatch(known)) and len(stored.shape) == 3:
            names = ("gate_proj", "up_proj") if found[3] == _GATE_UP else (_DOWN,)
            rows = stored.shape[1] // len(names)
            for i in range(stored.shape[0]):
                for part, inner in enumerate(names):
                    plain[f"{found[1]}.{i}.{inner}.weight"] = OfExpert(
                        name, stored.path, stored.file, (rows, stored.shape[2]), stored.dtype,
                        index=i, first=part * rows,
                    )  # fmt: skip
        elif not name.startswith(IMAGES):
            plain[known] = stored
    return plain

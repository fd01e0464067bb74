"""The tensors of a folder's layers for images, which exports hold as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from instep.checkpoints.hf_export import read_hf_config
from instep.checkpoints.weight_files import opened, weight_files
from instep.models.images import has_language_model, image_names
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec


class WithImages(WeightSource):
    """A weight source and, after its tensors, those of the layers for images in the Hugging Face folder `folder`."""

    def __init__(self, source: WeightSource, folder: Path):
        self._source, self.emits = source, source.emits
        self._images = image_tensors(folder)
        self.specs = [*source.specs, *image_specs(self._images)]

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]:
        yield from self._source
        for spec in self.specs[len(self._source.specs) :]:
            yield spec, self._images[spec.name] if self.emits else None


def image_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the layers for images by name; their files are mapped.

    Raises: ConfigError, CheckpointError.
    """
    if not has_language_model(read_hf_config(folder)):
        return {}
    files = weight_files(folder)
    names = image_names(files)
    tensors: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(files[name] for name in names):
        with opened(path) as file:
            tensors |= {name: file.get_tensor(name) for name in names if files[name] == path}
    return tensors


def image_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]

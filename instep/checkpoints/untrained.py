"""The tensors of a folder that a run does not train: layers for images, and of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from instep.checkpoints.hf_export import read_hf_config
from instep.checkpoints.hf_weights import StoredTensor, opened_weights
from instep.checkpoints.weight_files import weight_files
from instep.models.images import has_language_model, image_names
from instep.models.mtp import mtp_names, num_mtp_layers
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec


@contextmanager
def untrained(folder: Path, specs: Sequence[TensorSpec], *, mtp: bool = True) -> Iterator[dict[str, StoredTensor]]:
    """Yield these tensors of the Hugging Face folder `folder` by name, while its files are open.

    Args:
        specs: of the trained weights; if these have layers of multi-token prediction, there are no more. Quantized
            tensors get their type.
        mtp: whether to look for such layers.

    Raises:
        CheckpointError, ConfigError: the folder cannot be read.
    """
    config = read_hf_config(folder)
    sizes = config.get("num_hidden_layers") or 0, num_mtp_layers(config)
    mtp = mtp and not mtp_names((spec.name for spec in specs), *sizes)

    def found(names: Sequence[str]) -> list[str]:
        images = image_names(names) if has_language_model(config) else []
        return images + (mtp_names(names, *sizes) if mtp else [])

    if not found([*weight_files(folder)]):
        yield {}
        return
    widest = max((s for s in specs if s.dtype.is_floating_point), key=lambda s: len(s.shape))
    with opened_weights(folder, widest.dtype) as stored:
        yield {name: stored[name] for name in found([*stored]) if stored[name].dtype is not None}


class WithUntrained(WeightSource):
    """A weight source and, after its tensors, those of `untrained`."""

    def __init__(self, source: WeightSource, more: Mapping[str, StoredTensor]):
        self._source, self._more, self.emits = source, more, source.emits
        self.specs = [*source.specs, *specs_of(more)]

    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        yield from self._source
        for spec in specs_of(self._more):
            yield spec, self._more[spec.name].read() if self.emits else None


def specs_of(tensors: Mapping[str, StoredTensor]) -> list[TensorSpec]:
    return [TensorSpec(name, t.shape, t.dtype) for name, t in tensors.items() if t.dtype is not None]

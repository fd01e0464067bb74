"""The layers of multi-token prediction that a run does not train: exports keep them, so that engines can draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from instep.checkpoints.hf_export import read_hf_config
from instep.checkpoints.hf_weights import opened_weights
from instep.models.mtp import mtp_names, num_mtp_layers
from instep.weights.spec import TensorSpec


@contextmanager
def untrained(folder: Path, specs: Sequence[TensorSpec]) -> Iterator[list[tuple[TensorSpec, Callable[[], Tensor]]]]:
    """Yield the tensors of these layers in the checkpoint `folder`, and how to read them.

    Args:
        specs: of the trained weights; if these have such layers, there are no more. Quantized tensors get their type.

    Raises:
        CheckpointError, ConfigError: the folder cannot be read.
    """
    config = read_hf_config(folder)
    sizes = config.get("num_hidden_layers") or 0, num_mtp_layers(config)
    if mtp_names((spec.name for spec in specs), *sizes):
        yield []
        return
    widest = max((s for s in specs if s.dtype.is_floating_point), key=lambda s: len(s.shape))
    with opened_weights(folder, widest.dtype) as stored:
        kept = [(name, stored[name]) for name in mtp_names(stored, *sizes)]
        yield [(TensorSpec(name, t.shape, t.dtype), t.read) for name, t in kept if t.dtype is not None]

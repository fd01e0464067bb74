"""The way `disk`: a Hugging Face checkpoint that engines load anew. It is slow, and the golden twin of other ways."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from instep.checkpoints.hf_export import export_hf
from instep.weights.manifest import DIGEST_KIND, TensorRecord, record_of, tensor_digest
from instep.weights.source import TensorSpec, WeightSource
from instep.weights.way import Carriage, Order, Sent


class Disk:
    """See `Way`."""

    digest_kind, digest = DIGEST_KIND, staticmethod(tensor_digest)

    def send(self, source: WeightSource, order: Order, emit: Callable[[TensorRecord], None]) -> None:
        """Write a checkpoint into `order.folder`, and emit the record of each tensor in it."""
        export_hf(_Recorded(source, emit), order.hf_checkpoint, order.folder)

    def drive(self, carriage: Carriage) -> Sent:
        """Let the engines load the checkpoint when it is complete; it is removed afterwards."""
        tensors: list[TensorRecord] = []
        with tempfile.TemporaryDirectory(prefix="instep-golden-", dir=carriage.disk_folder) as root:
            path = Path(root).absolute() / "hf"
            carriage.publish(path, tensors.append)
            carriage.deliver({"backend": "disk", "path": str(path)})
        return Sent(tuple(tensors), self.digest_kind)


WAY = Disk()


class _Recorded:
    """A weight source that tells of each tensor as it passes."""

    def __init__(self, source: WeightSource, tell: Callable[[TensorRecord], None]):
        self._source, self._tell = source, tell
        self.specs, self.emits = source.specs, source.emits

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]:
        for spec, tensor in self._source:
            if tensor is not None:
                self._tell(record_of(spec.name, tensor.detach().to("cpu")))
            yield spec, tensor

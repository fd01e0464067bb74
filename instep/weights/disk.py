"""The way `disk`: engines load a Hugging Face checkpoint. It is slow; other ways are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from instep.checkpoints.hf_export import export_hf
from instep.scratch import Scratch
from instep.weights.manifest import DIGEST_KIND, TensorRecord, record_of, tensor_digest
from instep.weights.place import GOLDEN
from instep.weights.source import TensorSpec, WeightSource
from instep.weights.way import Carriage, Order, Sent


class Disk:
    digest_kind, digest = DIGEST_KIND, staticmethod(tensor_digest)
    name = "disk"

    def send(self, source: WeightSource, order: Order, emit: Callable[[TensorRecord], None]) -> None:
        """Write a checkpoint as `order.folder`, and emit the record of each of its tensors."""
        export_hf(Recorded(source, emit), order.hf_checkpoint, order.folder)

    def drive(self, carriage: Carriage) -> Sent:
        """Let the engines load the complete checkpoint, then remove it."""
        tensors: list[TensorRecord] = []
        with Scratch(GOLDEN, carriage.disk_folder) as root:
            path = root / "hf"
            carriage.publish(path, tensors.append)
            carriage.deliver({"backend": self.name, "path": str(path)})
        return Sent(tuple(tensors), self.digest_kind)


WAY = Disk()


class Recorded(WeightSource):
    """A weight source that tells the record of each tensor that it yields."""

    def __init__(self, source: WeightSource, tell: Callable[[TensorRecord], None]):
        self._source, self._tell = source, tell
        self.specs, self.emits = source.specs, source.emits

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]:
        for spec, tensor in self._source:
            if tensor is not None:
                self._tell(record_of(spec.name, tensor.detach().to("cpu")))
            yield spec, tensor

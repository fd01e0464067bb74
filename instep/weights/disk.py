"""The way `disk`: engines load a Hugging Face checkpoint. It is slow; other ways are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from instep.checkpoints.hf_export import export_hf
from instep.checkpoints.untrained import WithUntrained, untrained
from instep.system.scratch import Scratch
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Carriage, Order, Sent
from instep_engine.manifest import DIGEST_KIND, BucketManifest, TensorRecord, record_of, tensor_digest
from instep_engine.place import GOLDEN


class Disk:
    digest_kind, digest = DIGEST_KIND, staticmethod(tensor_digest)
    name = "disk"

    def send(self, source: WeightSource, order: Order, emit: Callable[[BucketManifest], None]) -> None:
        """Write a checkpoint as `order.folder`, and emit its manifest when it is complete."""
        with untrained(order.hf_checkpoint, source.specs, mtp=False) as images:
            recorded = Recorded(WithUntrained(source, images))
            export_hf(recorded, order.hf_checkpoint, order.folder)
        recorded.tell(order, emit)

    def drive(self, carriage: Carriage) -> Sent:
        """Let the engines load the complete checkpoint and compare its digests, then remove it."""
        with Scratch(GOLDEN, carriage.disk_folder) as root:
            manifest = self.published(carriage, root / f"v{carriage.version}")
            carriage.deliver({"backend": self.name, "path": manifest.path, "manifest": manifest.to_json()})
        return Sent(manifest.tensors, self.digest_kind)

    @staticmethod
    def published(carriage: Carriage, path: Path) -> BucketManifest:
        """Let the workers write the checkpoint `path`."""
        manifests: list[BucketManifest] = []
        carriage.publish(path, manifests.append)
        (manifest,) = manifests
        return manifest


WAY = Disk()


class Recorded(WeightSource):
    """A weight source that keeps the record of each tensor that it yields."""

    def __init__(self, source: WeightSource):
        self._source = source
        self._records: list[TensorRecord] = []
        self.specs, self.emits = source.specs, source.emits

    def tell(self, order: Order, emit: Callable[[BucketManifest], None]) -> None:
        """Emit the manifest of what was written as `order.folder`, on a rank that has written it."""
        if self.emits:
            emit(BucketManifest(str(order.folder), order.version, order.nonce, tuple(self._records)))

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]:
        for spec, tensor in self._source:
            if tensor is not None:
                self._records.append(record_of(spec.name, tensor.detach().to("cpu")))
            yield spec, tensor

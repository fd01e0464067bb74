"""The way `lora`: the adapter alone travels, in shared memory; the engines have the base that it belongs to.

On GPUs that trainer and engines share it is `lora_ipc.py` that a run with `--weight-sync lora` uses, and for engines on
other hosts `lora_disk.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

from instep.weights.shm import Shm
from instep.weights.source import AdapterSource, WeightSource
from instep.weights.way import Order
from instep_engine.manifest import BucketManifest


@dataclass(frozen=True)
class AdapterManifest(BucketManifest):
    """The manifest of a bucket of adapter tensors.

    `config` is peft's `adapter_config.json`, and says as `num_tensors` how many tensors all buckets hold.
    """

    config: dict[str, Any]


class Lora(Shm):
    name = "lora"

    def send(self, source: WeightSource, order: Order, emit: Callable[[AdapterManifest], None]) -> None:
        """Write the adapter as buckets, and emit their manifests, each with the configuration of the adapter."""
        config = {**cast(AdapterSource, source).config, "num_tensors": len(source.specs)}

        def tell(manifest: BucketManifest) -> None:
            emit(AdapterManifest(**{f.name: getattr(manifest, f.name) for f in fields(manifest)}, config=config))

        super().send(source, order, tell)


WAY = Lora()

"""The way `lora`: the adapter alone travels, in shared memory; the engines have the base that it belongs to.

On GPUs that trainer and engines share it is `lora_ipc.py` that a run with `--weight-sync lora` uses, and for engines on
other hosts `lora_disk.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from instep.weights.shm import Shm
from instep.weights.source import WeightSource, adapter_config
from instep.weights.way import Order
from instep_engine.manifest import BucketManifest


class Lora(Shm):
    name = "lora"

    def send(self, source: WeightSource, order: Order, emit: Callable[[BucketManifest], None]) -> None:
        """Write the adapter as buckets, and emit their manifests, each with the configuration of the adapter."""
        config = adapter_config(source)
        super().send(source, order, lambda manifest: emit(replace(manifest, config=config)))


WAY = Lora()

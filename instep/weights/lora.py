"""The way `lora`: only the adapter travels, in shared memory. The engines have its base.

With `--weight-sync lora`, a run uses `lora_ipc.py` if trainer and engines share GPUs, and `lora_disk.py` for engines on
other hosts.
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

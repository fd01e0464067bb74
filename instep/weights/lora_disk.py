"""The way `lora_disk`: engines load an adapter from disk in peft's format. Other hosts only need to see the folder.

The way `lora` is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable

from instep.checkpoints.adapter import export_adapter
from instep.weights.disk import Disk, Recorded
from instep.weights.source import WeightSource, adapter_config
from instep.weights.way import Order
from instep_engine.manifest import BucketManifest


class LoraDisk(Disk):
    name = "lora_disk"

    def send(self, source: WeightSource, order: Order, emit: Callable[[BucketManifest], None]) -> None:
        """Write the adapter as the folder `order.folder`, and emit its manifest when it is complete."""
        recorded = Recorded(source)
        export_adapter(recorded, adapter_config(source), order.folder)
        recorded.tell(order, emit)


WAY = LoraDisk()

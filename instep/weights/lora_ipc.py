"""The way `lora` if trainer and engines are on the same GPUs: the adapter travels as all weights do by `ipc`.

The buckets have the size of the adapter, if it is less than `--update-weight-buffer-size`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from instep.weights.ipc import Ipc
from instep.weights.nccl import Event
from instep.weights.source import WeightSource, adapter_config
from instep.weights.way import Order
from instep_engine.stream import Invitation


class LoraIpc(Ipc):
    name = "lora_ipc"

    def send(self, source: WeightSource, order: Order, emit: Callable[[Event], None]) -> None:
        """Send the adapter. The engines get its configuration with the invitation."""
        config = adapter_config(source)

        def tell(event: Event) -> None:
            emit(replace(event, config=config) if isinstance(event, Invitation) else event)

        super().send(source, order, tell)


WAY = LoraIpc()

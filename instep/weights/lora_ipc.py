"""The way `lora` where trainer and engines are on the same GPUs: the adapter travels as all weights do by `ipc`.

The buckets are as large as the adapter, if that is less than `--update-weight-buffer-size`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

from instep.weights.ipc import Ipc
from instep.weights.nccl import Event
from instep.weights.source import AdapterSource, WeightSource
from instep.weights.way import Order
from instep_engine.stream import Invitation


@dataclass(frozen=True)
class AdapterInvitation(Invitation):
    """The invitation to the stream of an adapter; `config` as in `lora.AdapterManifest`."""

    config: dict[str, Any]


class LoraIpc(Ipc):
    name = "lora_ipc"

    def send(self, source: WeightSource, order: Order, emit: Callable[[Event], None]) -> None:
        """Send the adapter; the engines get its configuration with the invitation."""
        config = {**cast(AdapterSource, source).config, "num_tensors": len(source.specs)}

        def tell(event: Event) -> None:
            emit(AdapterInvitation(**vars(event), config=config) if isinstance(event, Invitation) else event)

        super().send(source, order, tell)

    def _told(self, invitation: Invitation) -> dict[str, Any]:
        told = asdict(invitation)
        return {"config": told.pop("config"), "invitation": told}


WAY = LoraIpc()

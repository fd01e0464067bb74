"""The way `single-copy`: the trainer writes into the memory that the engine computes with; no byte travels.

The engine shares its weights when it starts (`memory.py`), and the first session of a trainer attaches to it. A source
whose parameters can be views of that memory makes them so (`WeightSource.write_into`). What a session hands to the
engine are digests of samples, by which it knows that the memory is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from instep.errors import SyncError
from instep.weights.manifest import TensorRecord, dtype_name
from instep.weights.memory import SAMPLE_KIND, EngineMemory, attach, nonce, sample_digest
from instep.weights.source import WeightSource
from instep.weights.way import Carriage, Order, Sent


@dataclass(frozen=True)
class Written:
    """What the trainer has written: the weights' records, and for each rank of the engine its memory and digests."""

    tensors: tuple[TensorRecord, ...]
    nonces: list[str]
    digests: list[dict[str, str]]


class SingleCopy:
    digest_kind, digest = SAMPLE_KIND, staticmethod(sample_digest)

    def __init__(self) -> None:
        self._memory: EngineMemory | None = None  # of this process's engine, while it is a worker

    def send(self, source: WeightSource, order: Order, emit: Callable[[Written], None]) -> None:
        """Write all weights into the engine's memory, and emit what it must find there.

        Raises:
            SyncError: the engine shares no memory, or holds another model.
        """
        if self._memory is None or self._memory.nonces[0] != nonce(order.folder):
            memory = attach(order.folder, lock=source.emits)
            try:
                memory.check(source.specs)
            except SyncError:
                memory.close()
                raise
            if self._memory is not None:
                self._memory.close()
            self._memory = memory
        source.write_into(self._memory)
        if source.emits:
            digests = self._memory.digests()
            together = {name: "".join(rank[name] for rank in digests if name in rank) for name in self._memory.shapes}
            records = [TensorRecord(s.name, s.shape, dtype_name(s.dtype), 0, 0, together[s.name]) for s in source.specs]
            emit(Written(tuple(records), self._memory.nonces, digests))

    def drive(self, carriage: Carriage) -> Sent:
        """Let the trainer write, and the engine compare samples of what it computes with."""
        events: list[Written] = []
        carriage.publish(carriage.memory_folder, events.append)
        (written,) = events
        carriage.deliver({"backend": "single-copy", "nonces": written.nonces, "digests": written.digests})
        return Sent(written.tensors, self.digest_kind)


WAY = SingleCopy()

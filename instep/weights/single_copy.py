"""The way `single-copy`: the trainer writes into the memory that the engines compute with; no byte travels.

Engines share their weights when they start (`memory.py`). The first session of a trainer attaches to them, after each
engine has confirmed that this memory is its own. So nothing is written into the memory of another server. A source
whose parameters can be views of that memory makes them views (`WeightSource.write_into`). A session sends the engines
digests of samples of the trainer's own weights. They must find these in their memory, which proves that it is the same
memory. On a CPU rank 0 sends all digests, on GPUs each rank those of the workers on its own. The proof compares every
bit of it with the trainer's own weights (`unwritten`), while the engines already serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from instep.errors import EngineError, SyncError
from instep.weights.memory import SAMPLE_KIND, EngineMemory, attach, digests_of, marks, nonces_in, sample_digest
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Carriage, Order, Sent
from instep_engine import OTHER_MEMORY
from instep_engine.manifest import TensorRecord, dtype_name


@dataclass(frozen=True)
class Written:
    """The required contents of the memory that a rank of the trainer has written.

    Attributes:
        digests: by the nonce of a worker's memory, and by name.
        specs: all weights; homes: the place of all memory, by nonce; both of the rank that emits.
        seconds: how long the rank took to `write`, and then to `sample` the written weights.
    """

    digests: dict[str, dict[str, str]]
    specs: tuple[TensorSpec, ...] = ()
    homes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class SingleCopy:
    digest_kind, digest = SAMPLE_KIND, staticmethod(sample_digest)

    def __init__(self) -> None:
        self._memory: EngineMemory | None = None  # of the engines, while this process is a worker
        self._marks: list[tuple[str, int, int]] = []
        self._shown: tuple[str, list[tuple[str, int, int]]] | None = None  # the engines, and the memory that is theirs

    def send(self, source: WeightSource, order: Order, emit: Callable[[Written], None]) -> None:
        """Write all weights into the engines' memory, and emit what they must find there.

        Raises:
            SyncError: an engine shares no memory, or holds another model.
        """
        found = marks(order.folder)
        if self._memory is None or self._marks != found:
            if self._memory is not None:
                self._memory.close()
            memory = attach(order.folder, lock=source.emits)
            try:
                memory.check(source.specs)
            except SyncError:
                memory.close()
                raise
            self._memory, self._marks = memory, found
        memory, began = self._memory, time.monotonic()
        memory.written_at = None
        samples = source.write_into(memory)
        memory.wait()
        written = memory.written_at or time.monotonic()
        if source.emits or memory.on_gpus:
            digests = {nonce: digests_of(found) for nonce, found in samples.items()}
            seconds = {"write": written - began, "sample": time.monotonic() - written}
            about = (tuple(source.specs), memory.homes) if source.emits else ((), {})
            emit(Written(digests, *about, seconds))

    def digests(self, source: WeightSource) -> dict[str, str]:
        """Return the digests that `Sent` has if the engines hold these weights (collective); for a worker."""
        memory = self._memory
        digest = memory.digest if memory is not None else lambda name, tensor: sample_digest(tensor)
        return {spec.name: digest(spec.name, tensor) for spec, tensor in source if tensor is not None}

    def unwritten(self, source: WeightSource) -> list[str]:
        """Return the names of weights that differ in any bit in the last session's memory (collective); for a worker.

        It compares only the memory that this rank has opened.
        """
        return source.unwritten(self._memory) if self._memory is not None else []

    def drive(self, carriage: Carriage) -> Sent:
        """Let the trainer write, and let each engine compare samples of the weights that it computes with."""
        events: list[Written] = []
        self._show(carriage)
        carriage.pause()  # the engine computes with what the trainer writes
        carriage.publish(carriage.memory_folder, events.append)
        digests = {nonce: found for event in events for nonce, found in event.digests.items()}
        (whole,) = (event for event in events if event.specs)
        if missed := [home for nonce, home in whole.homes.items() if nonce not in digests]:
            raise SyncError(
                f"no rank of the trainer is on the GPU of {missed[0]}, so no rank can write there",
                where="--weight-sync single-copy",
                remedy="place a rank on each GPU of the engine (--colocate; see `instep plan`) or --weight-sync shm",
            )
        together = {s.name: "".join(digests[nonce].get(s.name, "") for nonce in whole.homes) for s in whole.specs}
        records = [TensorRecord(s.name, s.shape, dtype_name(s.dtype), 0, 0, together[s.name]) for s in whole.specs]
        carriage.deliver({"backend": "single-copy", "digests": digests})
        seconds = {name: max(e.seconds.get(name, 0.0) for e in events) for name in ("write", "sample")}
        return Sent(tuple(records), self.digest_kind, seconds)

    def _show(self, carriage: Carriage) -> None:
        """Let each engine confirm that the memory is its own, unless the same engines have confirmed the same memory.

        Raises:
            SyncError: it is another server's, or was another's; nothing has been written there.
        """
        shown = carriage.audience(), marks(carriage.memory_folder)
        if shown == self._shown:
            return
        try:
            carriage.show({"backend": "memory", "memory": nonces_in(carriage.memory_folder)})
        except EngineError as error:
            if OTHER_MEMORY not in error.what:
                raise
            raise SyncError(
                f"{error.what}; nothing was written",
                where=f"{error.where}, {carriage.memory_folder}",
                remedy="give the vllm_bridge_config.json of the server at that address with --vllm-config-path (its "
                "log names the file), or the server of that file with --rollout-external-engine-addrs",
            ) from error
        self._shown = shown


WAY = SingleCopy()

"""vLLM's group of processes that share a TCPStore and nothing global."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

WAIT = timedelta(seconds=30)


@dataclass
class StatelessProcessGroup:
    """`rank` of `world_size` at `store`; rank 0 is its master."""

    rank: int
    world_size: int
    store: TCPStore
    sent: int = 0  # objects this rank has broadcast
    received: dict[int, int] = field(default_factory=dict)  # of each source

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        """Meet the others; the master waits until each has counted itself, as in vLLM."""
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=WAIT)
        return StatelessProcessGroup(rank, world_size, store)

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """`obj` of rank `src`, through the store under vLLM's key `broadcast_from/<src>/<n>`."""
        if self.rank == src:
            self.store.set(f"broadcast_from/{src}/{self.sent}", pickle.dumps(obj))
            self.sent += 1
            return obj
        number = self.received.get(src, 0)
        self.received[src] = number + 1
        return pickle.loads(self.store.get(f"broadcast_from/{src}/{number}"))

    def barrier(self) -> None:
        """vLLM's: rank 0 names it, each rank signs its arrival, then its departure, for which rank 0 alone waits."""
        name = self.broadcast_obj(f"barrier_{uuid.uuid4()}", src=0)
        self.store.set(f"arrival_{name}_{self.rank}", b"1")
        self.store.wait([f"arrival_{name}_{rank}" for rank in range(self.world_size)], WAIT)
        self.store.set(f"departure_{name}_{self.rank}", b"1")
        if self.rank == 0:
            self.store.wait([f"departure_{name}_{rank}" for rank in range(self.world_size)], WAIT)

"""Ranks as threads of this process, which gloo connects: no processes start, and results are no copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore


def in_threads(function: Callable[[int, ProcessGroup], Any], size: int, timeout: float = 60) -> list[Any]:
    """`function(rank, group)` on `size` ranks; each rank's result. Backward passes run in their rank's thread."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group, gloo = ProcessGroup(store, rank, size), ProcessGroup.BackendType.GLOO
        group._set_default_backend(gloo)
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        group._register_backend(torch.device("cpu"), gloo, backend)
        with torch.autograd.set_multithreading_enabled(False):
            return function(rank, group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@contextmanager
def one_of(size: int) -> Iterator[ProcessGroup]:
    """The group of rank 0 of `size`, without the others: its collectives take the memory that they would take."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()

"""How the ranks of a role find each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def store(rendezvous: str, world_size: int, timeout: float) -> dist.Store:
    """Return the store of a process group; see `Worker.setup` for `rendezvous`.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    if not rendezvous.startswith("tcp://"):
        shared = dist.FileStore(rendezvous, world_size)
        shared.set_timeout(timedelta(seconds=timeout))
        return shared
    host, _, rest = rendezvous.removeprefix("tcp://").rpartition(":")
    port, _, fd = rest.partition("?fd=")
    return dist.TCPStore(
        host,
        int(port),
        world_size,
        is_master=bool(fd),
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=int(fd) if fd else None,  # without it TCPStore would listen on all addresses of the host
    )

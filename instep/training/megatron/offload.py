"""Tensors to host memory and back without replacing them: views, buffers and optimizers keep working."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """The storages of CUDA tensors, freed on the device until `restore`."""

    def __init__(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()):
        """Moves the storages of `keep`; frees those of `drop`, which come back as zeros."""
        self._kept = [(s, s.nbytes(), s.cpu()) for s in _storages(keep)]
        self._dropped = [(s, s.nbytes()) for s in _storages(drop)]
        for storage in [entry[0] for entry in self._kept + self._dropped]:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        for storage, size, host in self._kept:
            storage.resize_(size)
            storage.copy_(host)
        for storage, size in self._dropped:
            storage.resize_(size)
            storage.fill_(0)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    cuda = (t.untyped_storage() for t in tensors if t.is_cuda)
    return list({s.data_ptr(): s for s in cuda if s.nbytes()}.values())

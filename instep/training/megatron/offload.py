"""Moving tensors to host memory and back in place, so that views, buffers and optimizers keep working."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostPool:
    """Pinned host memory (kept for the next time: pinning is slow) for the storages of CUDA tensors."""

    def __init__(self) -> None:
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, int, bool]] = []  # storage, bytes, to be restored

    def take(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> None:
        """Move the storages of `keep` here and free those of `drop`, which come back as zeros; no-op if done."""
        if self._away:
            return
        self._away = [(s, s.nbytes(), kept) for t, kept in ((keep, True), (drop, False)) for s in _storages(t)]
        total = sum(size for _, size, restored in self._away if restored)
        if total > self._pool.numel():
            self._pool = torch.empty(0, dtype=torch.uint8)
            self._pool = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        start = 0
        for storage, size, restored in self._away:
            if restored:
                self._pool[start : start + size].copy_(_bytes(storage), non_blocking=True)
                start += size
        torch.cuda.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Undo `take`."""
        start = 0
        for storage, size, restored in self._away:
            storage.resize_(size)
            if restored:
                _bytes(storage).copy_(self._pool[start : start + size], non_blocking=True)
                start += size
            else:
                storage.fill_(0)
        if self._away:
            torch.cuda.synchronize()
        self._away = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    cuda = (t.untyped_storage() for t in tensors if t.is_cuda)
    return list({s.data_ptr(): s for s in cuda if s.nbytes()}.values())

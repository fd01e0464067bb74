"""The bytes of tensors that live at a time, counted while operators run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make; a tensor of the device `meta` counts with what it would hold.

    Attributes:
        now, peak: bytes of those that live, and the most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known | self._known:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

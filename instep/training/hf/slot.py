"""KVBudget on a GPU for moments in host memory, during the step of their weights."""

from __future__ import annotations

import torch
from torch import Tensor


class Slot:
    """Buffers on the device for the moments of `length` elements, and scales of `block` of them.

    Attributes:
        here: the moments, by name.
    """

    def __init__(self, length: int, block: int) -> None:
        self._length, self._block = length, block
        self.arrived, self.computed, self.left = (torch.cuda.Event() for _ in range(3))
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}  # nothing is freed in a step: it may still be copied out
        self.here: dict[str, Tensor] = {}

    def make_room(self, host: dict[str, Tensor]) -> bool:
        """Allocate buffers for tensors like these. Return whether some are new."""
        new = [(name, tensor.dtype) for name, tensor in host.items() if (name, tensor.dtype) not in self._room]
        for name, dtype in new:
            length = self._length // self._block if name.endswith("_scale") else self._length
            self._room[name, dtype] = torch.empty(length, dtype=dtype, device="cuda")
        return bool(new)

    def copy_in(self, host: dict[str, Tensor]) -> None:
        self.here = {name: self._room[name, tensor.dtype][: len(tensor)] for name, tensor in host.items()}
        for name, tensor in host.items():
            self.here[name].copy_(tensor, non_blocking=True)

    def copy_out(self, host: dict[str, Tensor]) -> None:
        for name, tensor in host.items():
            tensor.copy_(self.here[name], non_blocking=True)

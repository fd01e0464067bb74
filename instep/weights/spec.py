"""What a weight is, without its values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class TensorSpec:
    """The Hugging Face name, the full shape and the serving dtype of one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

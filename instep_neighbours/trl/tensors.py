"""A tensor on its way from a trainer to the engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


class WrongTensor(Exception):
    """A trainer announced a tensor that does not belong into this update; the message says what to do."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a slot, and as what the engines take it. `path` is set for one slot (`Slot.placed`).

    `first` is its first element in the tensor that a trainer sends, which may hold several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    number: int  # of the slot's file
    offset: int
    path: str = ""
    first: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Announced:
    """A tensor as the trainer announces it.

    Attributes:
        served: the dtype that the engines have it in.
        places: where its parts go; none: it is received and looked at, but not kept.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    served: str
    places: tuple[Place, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """A dtype from "bfloat16" or "torch.bfloat16". Raises WrongTensor for what is none."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WrongTensor(f"{name!r} is no dtype of torch")
    return dtype

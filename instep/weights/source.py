"""What a trainer offers to a sync: its weights, one after another, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass
class TensorSpec:
    """Name (as in a Hugging Face checkpoint), full shape and serving dtype of one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """The policy's weights under Hugging Face names; tied weights appear once.

    Iterating is collective: all ranks, one order. A yielded tensor is valid until the next one. On ranks that are not
    `emits` the tensor is None.
    """

    specs: list[TensorSpec]  # known without moving a byte
    emits: bool  # True on the ranks that receive full tensors (rank 0 at least)

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]: ...

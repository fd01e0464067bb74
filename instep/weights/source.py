"""The weight source, through which a trainer hands its weights to a sync or an export, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass
class TensorSpec:
    """The Hugging Face name, the full shape and the serving dtype of one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """The policy's weights under Hugging Face names; tied weights appear once.

    Iterating is collective: all ranks iterate in the same order. A yielded tensor is valid until the next one, and is
    None on ranks whose `emits` is False.
    """

    specs: list[TensorSpec]  # known without moving a byte
    emits: bool  # True on the ranks that receive full tensors (rank 0 at least)

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]: ...

"""Tensors that follow each other in memory: one kernel can read or write all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat view of contiguous tensors of one type; None if they do not follow each other in one storage."""
    first = tensors[0].detach()
    storage, at = first.untyped_storage()._cdata, first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or tensor.untyped_storage()._cdata != storage:
            return None
        at += tensor.numel() * tensor.element_size()
    return first.as_strided(((at - first.data_ptr()) // first.element_size(),), (1,))


@torch.no_grad()
def lay_out(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors of one type into new memory, one after the other; return it as a flat view."""
    memory = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for tensor, part in zip(tensors, memory.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = part.view(tensor.shape)
    return memory

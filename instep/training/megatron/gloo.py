"""Collectives over parts of different sizes, which gloo does not have: experts that several ranks share need them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install(mappings: Any) -> None:
    """Replace them in Megatron's `tensor_parallel.mappings`; parts of one size stay Megatron's."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def any_gather(part: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)])

    def any_reduce_scatter(
        whole: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, None, use_global_buffer)
        total = whole.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = any_gather, any_reduce_scatter

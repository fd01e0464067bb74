"""Whole weights of a model that FSDP2 shards, gathered in batches: one is in transfer while another is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from instep.training.hf.shards import whole

BATCH_BYTES = 256 << 20  # of whole weights; a rank needs twice that, for the batch in transfer

Wanted = Sequence[tuple[Tensor, torch.dtype]]
Finish = Callable[[], Iterator[Tensor | None]]


def in_batches(weights: Wanted, emits: bool) -> Iterator[Tensor | None]:
    """Yield each whole weight in the dtype beside it, in their order (collective); None on ranks that do not emit."""
    finish: Finish | None = None
    for batch in _batches(weights):
        following = _start(batch, emits) if _is_sharded(batch[0][0]) else _alone(batch, emits)
        if finish is not None:
            yield from finish()
        finish = following
    if finish is not None:
        yield from finish()


def _is_sharded(weight: Tensor) -> bool:
    """Return whether several ranks have some rows of it each, and it is not divided in another way."""
    return isinstance(weight, DTensor) and weight.placements == (Shard(0),) and weight.device_mesh.size() > 1


def _batches(weights: Wanted) -> Iterator[Wanted]:
    """Yield neighbours that can be transferred together."""
    batch: list[tuple[Tensor, torch.dtype]] = []
    size = 0
    for weight, dtype in weights:
        num_bytes = weight.numel() * dtype.itemsize
        fits = _is_sharded(weight) and size + num_bytes <= BATCH_BYTES
        if batch and not (fits and _is_sharded(batch[0][0]) and batch[0][1] is dtype):
            yield batch
            batch, size = [], 0
        batch.append((weight, dtype))
        size += num_bytes
    if batch:
        yield batch


@torch.no_grad()
def _start(batch: Wanted, emits: bool) -> Finish:
    """Start to gather. Each rank sends its rows in the target dtype, padded to the size of the first rank's."""
    dtype, first = batch[0][1], batch[0][0]
    assert isinstance(first, DTensor)
    num_ranks, mine = first.device_mesh.size(), first.to_local()
    sizes = [-(-w.shape[0] // num_ranks) * (w.numel() // w.shape[0]) for w, _ in batch]
    packed = torch.empty(sum(sizes), dtype=dtype, device=mine.device)
    for (weight, _), place in zip(batch, packed.split(sizes), strict=True):
        assert isinstance(weight, DTensor)
        rows = weight.to_local()
        place[: rows.numel()].copy_(rows.reshape(-1))
    out = torch.empty(num_ranks * sum(sizes), dtype=dtype, device=mine.device)
    work = dist.all_gather_into_tensor(out, packed, first.device_mesh.get_group(), async_op=True)

    def finish() -> Iterator[Tensor | None]:
        work.wait()
        for (weight, _), part in zip(batch, out.view(num_ranks, -1).split(sizes, 1), strict=True):
            yield part.reshape(-1)[: weight.numel()].view(weight.shape) if emits else None

    return finish


def _alone(batch: Wanted, emits: bool) -> Finish:
    def finish() -> Iterator[Tensor | None]:
        for weight, dtype in batch:
            weight = weight.detach()  # faster than no_grad, which a generator would switch at each tensor
            if isinstance(weight, DTensor) and weight.device_mesh.size() > 1:
                full = whole(weight.to(dtype))  # cast first: half the bytes to send
            else:
                full = whole(weight).to(dtype)
            yield full if emits else None

    return finish

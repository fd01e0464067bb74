"""Gathering sharded weights in batches gives the weights, on any number of ranks and for any size of a batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from instep.training.hf import gather


def _gather(batch_bytes: int) -> list[bool]:
    """Whether each weight, and a buffer, are whole on the rank that emits; the rows of few divide evenly."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [(7, 5), (64, 32), (2,), (1, 3), (65, 16), (33, 2, 3)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    full = [torch.randn(shape) for shape in shapes]
    wanted = [(distribute_tensor(t, mesh, [Shard(0)]), dtype) for t, dtype in zip(full, dtypes, strict=True)]
    wanted.append((full[0], torch.float32))
    gather.BATCH_BYTES = batch_bytes
    emits = dist.get_rank() == 0
    found = list(gather.in_batches(wanted, emits))
    expected = [t.to(dtype) for t, (_, dtype) in zip([*full, full[0]], wanted, strict=True)]
    return [torch.equal(t, e) if emits else t is None for t, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_bytes", [1, 5000, 1 << 20])
def test_batches_give_whole_weights(run_ranks, world_size, batch_bytes):
    assert run_ranks(_gather, world_size, batch_bytes) == [[True] * 7] * world_size

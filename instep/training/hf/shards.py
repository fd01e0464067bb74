"""A weight that several ranks share: the part here, the whole, and the place of this rank's part in the whole.

Tensor parallelism (mesh dimension `tp`) cuts a weight along one dimension. FSDP2 (`dp`) cuts the part of each of those
ranks along dimension 0. Weights without tensor parallelism are the same on its ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

DP, TP = "dp", "tp"


@functools.cache
def mesh_of(device_type: str, tp_size: int) -> DeviceMesh:
    """Return the mesh of all ranks, data-parallel by tensor-parallel; neighbours share a layer. It has only `dp` unless
    `tp_size` > 1."""
    ranks = dist.get_world_size()
    if tp_size == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=(DP,))
    return init_device_mesh(device_type, (ranks // tp_size, tp_size), mesh_dim_names=(DP, TP))


@dataclass(frozen=True)
class Part:
    """The slice of a whole weight on a tensor-parallel rank: `[start, stop)` of dimension `dim`."""

    dim: int
    start: int
    stop: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.stop - self.start)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's tensor; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(weight: Tensor) -> Part | None:
    """Return the slice of its tensor-parallel rank; None if all ranks have the whole weight (except for FSDP2)."""
    if not isinstance(weight, DTensor) or TP not in (weight.device_mesh.mesh_dim_names or ()):
        return None
    placement = weight.placements[-1]
    assert isinstance(placement, Shard)
    size, rank = weight.device_mesh.size(-1), weight.device_mesh.get_local_rank(TP)
    length = weight.shape[placement.dim] // size
    return Part(placement.dim, rank * length, (rank + 1) * length)


def num_dp(mesh: DeviceMesh) -> int:
    """Return the number of data-parallel ranks of a mesh; `mesh[DP]` would create a mesh, which takes a millisecond."""
    return mesh.size((mesh.mesh_dim_names or ()).index(DP))


def box(weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a weight."""
    shape, offset = list(weight.shape), [0] * weight.ndim
    if (part := part_of(weight)) is not None:
        shape[part.dim], offset[part.dim] = part.stop - part.start, part.start
    if isinstance(weight, DTensor) and DP in (weight.device_mesh.mesh_dim_names or ()):
        mesh = weight.device_mesh
        rows = -(-shape[0] // num_dp(mesh))  # FSDP2 divides like torch.chunk
        first = min(rows * mesh.get_local_rank(DP), shape[0])
        shape[0], offset[0] = min(rows, shape[0] - first), offset[0] + first
    return tuple(shape), tuple(offset)


def gathered(weight: Tensor) -> Tensor:
    """Return this tensor-parallel rank's part, gathered over data-parallel ranks (collective)."""
    part = part_of(weight)
    if not isinstance(weight, DTensor) or part is None:
        return weight.full_tensor() if isinstance(weight, DTensor) else weight
    if DP not in (weight.device_mesh.mesh_dim_names or ()):  # FSDP2 does not shard it
        return weight.to_local()
    shape = list(weight.shape)
    shape[part.dim] = part.stop - part.start
    over_dp = DTensor.from_local(
        weight.to_local(),
        mesh_of(weight.device_mesh.device_type, weight.device_mesh.size(-1))[DP],
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return over_dp.full_tensor()


def whole(weight: Tensor) -> Tensor:
    """Return the whole weight, on every rank (collective)."""
    if isinstance(weight, DTensor) and weight.device_mesh.size() == 1:  # gathering it would cost more than sending it
        return weight.to_local()
    mine, part = gathered(weight), part_of(weight)
    if part is None or not isinstance(weight, DTensor):
        return mine
    mesh = mesh_of(weight.device_mesh.device_type, weight.device_mesh.size(-1))[TP]
    return DTensor.from_local(mine.contiguous(), mesh, [Shard(part.dim)], run_check=False).full_tensor()


def shard(weight: Tensor, full: Tensor) -> Tensor:
    """Return the part of `full` that `local(weight)` holds."""
    if not isinstance(weight, DTensor):
        return full
    part = part_of(weight)
    return over_dp(weight, full if part is None else part.of(full))


def over_dp(weight: Tensor, mine: Tensor) -> Tensor:
    """Return the part of a tensor-parallel rank's tensor that `local(weight)` holds."""
    if not isinstance(weight, DTensor):
        return mine
    chunks = mine.chunk(weight.device_mesh.size(0))
    rank = weight.device_mesh.get_local_rank(0)
    return chunks[rank] if rank < len(chunks) else mine[:0]


@torch.no_grad()
def write(weight: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into the weight, each rank its part, without communication."""
    local(weight).copy_(shard(weight, full))


def shard_over(policy: nn.Module, model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 over `mesh`: a unit per decoder layer of its `model`, the rest in the root. Gradients are summed."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # The root's inputs are not cast: a temperature of 0.7 would become 0.699 in bfloat16.
    fully_shard(policy, mesh=mesh, mp_policy=dataclasses.replace(precision, cast_forward_inputs=False))
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction

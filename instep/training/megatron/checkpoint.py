"""Model and optimizer as a Megatron `torch_dist` checkpoint, loadable under any layout and either kind of optimizer.

The optimizer's part does not come from `optimizer.sharded_state_dict`: that one differs between the plain and the
distributed optimizer, and loading it into the latter is broken in 0.16.x with torch's AdamW. Here every parameter has
its moments (and, if it is not float32 itself, its float32 master) under one name and in the parameter's own shape.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from instep.errors import CheckpointError
from instep.models.weight_map import HEAD

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Master:
    """The part of one parameter that the optimizer of this rank steps: its elements [start, stop), flattened."""

    tensor: Tensor  # what the optimizer steps: the parameter itself, a float32 copy, or a flat piece of either
    state: dict[str, Any]
    start: int
    stop: int


def masters(optimizer: Any) -> dict[torch.nn.Parameter, Master]:
    """Masters by model parameter; the distributed optimizer has them for the parameters of this rank's piece."""
    found: dict[torch.nn.Parameter, Master] = {}
    for opt in optimizer.chained_optimizers:
        inner = opt.optimizer
        if isinstance(opt, DistributedOptimizer):
            ranges = [m for maps in opt.gbuf_ranges for buckets in maps.values() for m in buckets]
            for param, where in (item for m in ranges for item in m["param_map"].items()):
                group, index = opt.model_param_group_index_map[param]
                main = inner.param_groups[group]["params"][index]
                found[param] = Master(main, inner.state[main], where["param"].start, where["param"].end)
        else:
            mains = {id(main): main for group in inner.param_groups for main in group["params"]}
            for group in getattr(opt, "float16_groups", []):
                found |= {p: Master(p.main_param, inner.state[p.main_param], 0, p.numel()) for p in group}
            copies = {id(m.tensor) for m in found.values()}
            found |= {p: Master(p, inner.state[p], 0, p.numel()) for i, p in mains.items() if i not in copies}
    return found


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` strategy, with the files written by this process itself.

    Upstream's starts a multiprocessing manager (3 s, and a main guard in the user's script), forks writers out of a
    process with threads, and waits for them without a bound.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _model_state(model: Any) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def _sharded_parameters(model_state: dict[str, Any]) -> dict[int, Any]:
    """Megatron's descriptions of how parameters lie over ranks, by id of the parameter."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(base.data): base for base in nested_values(sharded)}


def _like(base: Any, name: str, data: Tensor) -> Any:
    """A description of `data`, which has the shape and the layout of the parameter, under a name of its own."""
    key = f"optimizer.{name}.{base.key}"
    if isinstance(base, ShardedTensorFactory):
        return replace(base, key=key, data=data)
    return replace(base, key=key, data=data, dtype=data.dtype)


def _names(param: torch.nn.Parameter) -> tuple[str, ...]:
    return MOMENTS if param.dtype is torch.float32 else (*MOMENTS, "master")


@torch.no_grad()
def _optimizer_state(optimizer: Any, sharded: dict[int, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    distributed = any(isinstance(opt, DistributedOptimizer) for opt in optimizer.chained_optimizers)
    held = masters(optimizer)
    out: dict[str, Any] = {}
    for param in parameters:
        base, master = sharded[id(param)], held.get(param)
        for name in _names(param):
            full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
            if master is not None:
                piece = master.tensor if name == "master" else master.state.get(name)
                if piece is not None:
                    full[master.start : master.stop] = piece.reshape(-1)
            if distributed and group.size() > 1:
                dist.reduce(full, group=group, group_dst=0)
            data = full.view(param.shape).cpu() if group.rank() == 0 else torch.zeros(()).expand(param.shape)
            out[f"{name}.{len(out)}"] = _like(base, name, data)
    return out


def _step(optimizer: Any) -> float:
    """The number of steps of the optimizer (torch keeps it per parameter, Transformer Engine per group)."""
    steps = [float(master.state["step"]) for master in masters(optimizer).values() if "step" in master.state]
    return max(steps + [float(group.get("step", 0)) for group in optimizer.param_groups])


def save(path: Path, model: Any, optimizer: Any | None) -> None:
    """Write a checkpoint into the existing folder `path`, collectively.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    state: dict[str, Any] = {"model": _model_state(model)}
    if optimizer is not None:
        # All ranks agree on the step: a distributed optimizer may leave a rank without a single element.
        step = torch.tensor(_step(optimizer), device=next(model.parameters()).device)
        dist.all_reduce(step, dist.ReduceOp.MAX)
        sharded = _sharded_parameters(state["model"])
        state["optimizer"] = _optimizer_state(optimizer, sharded, list(model.parameters()))
        state["optimizer_step"] = float(step)
    try:
        dist_checkpointing.save(state, str(path), InProcessSave("torch_dist", 1))
    except (OSError, RuntimeError, CheckpointingException, dcp.CheckpointException) as error:
        raise CheckpointError(
            f"the checkpoint was not written: {error}", where=str(path), remedy="make room on the disk, or use another"
        ) from error


@torch.no_grad()
def load(path: Path, model: Any, optimizer: Any | None, *, fresh_head: bool = False) -> None:
    """Read what `save` wrote, collectively.

    Args:
        fresh_head: the output layer is not read but becomes zero.

    Raises:
        CheckpointError: no such checkpoint, or one of another model.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise CheckpointError("no Megatron checkpoint", where=str(path), remedy="point to a folder that instep saved")
    state: dict[str, Any] = {"model": _model_state(model)}
    head = {HEAD: model.output_layer.weight.zero_()} if fresh_head and model.post_process else {}
    for name in head:
        del state["model"][name]
    parameters = list(model.parameters())
    keys: list[tuple[torch.nn.Parameter, str, str]] = []
    if optimizer is not None:
        sharded, state["optimizer"] = _sharded_parameters(state["model"]), {}
        for param in parameters:
            for name in _names(param):
                keys.append((param, name, f"{name}.{len(keys)}"))
                empty = torch.zeros(param.shape, dtype=torch.float32)
                state["optimizer"][keys[-1][2]] = _like(sharded[id(param)], name, empty)
    try:
        loaded = dist_checkpointing.load(state, str(path))
    except (CheckpointingException, dcp.CheckpointException, OSError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit: {error}", where=str(path), remedy="load it with the model that wrote it"
        ) from error
    model.load_state_dict(loaded["model"] | head, strict=True)
    if optimizer is None:
        return
    held = masters(optimizer)
    for param, name, key in keys:
        if (master := held.get(param)) is None:
            continue
        piece = loaded["optimizer"][key].reshape(-1)[master.start : master.stop].view(master.tensor.shape)
        if name == "master":
            master.tensor.copy_(piece)
        else:
            master.state[name] = piece.to(master.tensor.device, copy=True)
    _set_step(optimizer, held, loaded["optimizer_step"])


def _set_step(optimizer: Any, held: dict[torch.nn.Parameter, Master], step: float) -> None:
    if isinstance(optimizer.chained_optimizers[0].optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        for master in held.values():
            master.state["step"] = torch.tensor(step)  # one each: AdamW adds to it once per parameter
    else:
        for group in optimizer.param_groups:
            group["step"] = int(step)

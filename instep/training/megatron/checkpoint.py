"""Save model and optimizer as a Megatron checkpoint, `torch_dist` or `torch`, and load them, also those of others.

A checkpoint loads in any layout and with either kind of optimizer. `optimizer.sharded_state_dict` is not used: it
differs between the plain and the distributed optimizer, and loading it into the latter is broken in 0.16.x with torch's
AdamW. Here every parameter has its moments (and a float32 master, if it is not float32) under one name and in its own
shape.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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

from instep.checkpoints.megatron import MegatronCheckpoint
from instep.checkpoints.megatron_files import OPTIMIZER, RANK_FILE
from instep.checkpoints.megatron_writer import megatron_arguments
from instep.errors import CheckpointError
from instep.models.shape import ModelShape
from instep.models.weight_map import HEAD, by_megatron
from instep.training.hf.optimizer import MOMENTS, PiecewiseAdamW
from instep.training.megatron.layout import Placement
from instep.training.saving import Saver


@dataclass
class Master:
    """The part of one parameter that this rank's optimizer steps: its elements [start, stop), flattened."""

    tensor: Tensor  # what the optimizer steps: the parameter itself, a float32 copy, or a flat piece of either
    optimizer: Any  # torch's optimizer, or a similar one
    start: int
    stop: int

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.tensor]
        return state

    def piece(self, whole: Tensor) -> Tensor:
        """Return the part of a value of the parameter's shape that belongs to `tensor`."""
        return whole.reshape(-1)[self.start : self.stop].view(self.tensor.shape)

    def moment(self, name: str) -> Tensor | None:
        """Return a moment in float32, from any storage; None before the step in which the optimizer creates it."""
        if isinstance(self.optimizer, PiecewiseAdamW):
            return self.optimizer.moment(self.tensor, name)
        return self.state.get(name)

    def set_moment(self, name: str, value: Tensor) -> None:
        if isinstance(self.optimizer, PiecewiseAdamW):
            self.optimizer.set_moment(self.tensor, name, value)
        elif name in self.state:
            self.state[name].copy_(value)
        else:
            self.state[name] = value.to(self.tensor.device, copy=True)


def real_optimizers(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers of dense and expert weights, without those that have nothing to train."""
    return [opt for opt in optimizer.chained_optimizers if not getattr(opt, "is_stub_optimizer", False)]


def masters(optimizer: Any) -> dict[Tensor, Master]:
    """Return masters by model parameter; a distributed optimizer has them for the parameters of this rank's piece."""
    found: dict[Tensor, Master] = {}
    for opt in real_optimizers(optimizer):
        inner = opt.optimizer
        if isinstance(opt, DistributedOptimizer):
            ranges = [m for maps in opt.gbuf_ranges for buckets in maps.values() for m in buckets]
            for param, where in (item for m in ranges for item in m["param_map"].items()):
                group, index = opt.model_param_group_index_map[param]
                main = inner.param_groups[group]["params"][index]
                found[param] = Master(main, inner, where["param"].start, where["param"].end)
        else:
            mains = {id(main): main for group in inner.param_groups for main in group["params"]}
            for group in getattr(opt, "float16_groups", []):
                found |= {p: Master(p.main_param, inner, 0, p.numel()) for p in group}
            copies = {id(m.tensor) for m in found.values()}
            found |= {p: Master(p, inner, 0, p.numel()) for i, p in mains.items() if i not in copies}
    return found


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` strategy, but this process itself writes the files.

    The original starts a multiprocessing manager (3 s, and a main guard in the user's script), forks writers from a
    process with threads, and waits for them without a limit.
    """

    def __init__(self, saver: Saver):
        super().__init__("torch_dist", 1)
        self._saver = saver

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._saver.save(mcore_to_pyt_state_dict(state, False), Path(checkpoint_dir), planner)


def _model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the chunks of this rank under Megatron's names; the names of tensors count layers over all stages."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()}


def _named(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return chunks by their keys in a checkpoint."""
    return {"model" if len(chunks) == 1 else f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _sharded_parameters(model_state: dict[str, Any]) -> dict[int, Any]:
    """Return Megatron's descriptions of how parameters are distributed over ranks, by id of the parameter."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(base.data): base for base in nested_values(sharded)}


def _like(base: Any, name: str, data: Tensor) -> Any:
    """Return a description of `data`, which has the parameter's shape and layout, under another name."""
    key = f"optimizer.{name}.{base.key}"
    if isinstance(base, ShardedTensorFactory):
        return replace(base, key=key, data=data)
    return replace(base, key=key, data=data, dtype=data.dtype)


def _copies(param: torch.nn.Parameter) -> Any:
    """Return the ranks with copies of a parameter; Megatron marks parameters of experts."""
    if getattr(param, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _names(param: Tensor) -> tuple[str, ...]:
    return MOMENTS if param.dtype is torch.float32 else (*MOMENTS, "master")


@torch.no_grad()
def whole_states(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[torch.nn.Parameter, str, Tensor | None]]:
    """Yield each parameter with the name and the value of each of its states; collective.

    The value has the parameter's shape on the first rank with a copy of it; on others it is None.
    """
    distributed = any(isinstance(opt, DistributedOptimizer) for opt in optimizer.chained_optimizers)
    held = masters(optimizer)
    for param in parameters:
        master, group = held.get(param), _copies(param)
        for name in _names(param):
            full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
            if master is not None:
                piece = master.tensor if name == "master" else master.moment(name)
                if piece is not None:
                    full[master.start : master.stop] = piece.reshape(-1)
            elif name == "master" and not param.requires_grad and group.rank() == 0:
                full.copy_(param.reshape(-1))  # frozen here; a resume may train it
            if distributed and group.size() > 1:
                dist.reduce(full, group=group, group_dst=0)
            yield param, name, full.view(param.shape) if group.rank() == 0 else None


def _optimizer_state(
    optimizer: Any, sharded: dict[int, Any], parameters: list[torch.nn.Parameter], saver: Saver
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for param, name, full in whole_states(optimizer, parameters):
        data = torch.zeros(()).expand(param.shape) if full is None else saver.to_host(full)
        out[f"{name}.{len(out)}"] = _like(sharded[id(param)], name, data)
    return out


def num_steps(optimizer: Any, device: torch.device) -> float:
    """Return the number of optimizer steps (torch keeps it per parameter, Transformer Engine per group); collective."""
    steps = [float(master.state["step"]) for master in masters(optimizer).values() if "step" in master.state]
    # All ranks agree: a distributed optimizer may leave a rank without elements.
    most = torch.tensor(max(steps + [float(group.get("step", 0)) for group in optimizer.param_groups]), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def save(path: Path, chunks: Sequence[Any], optimizer: Any | None, saver: Saver) -> None:
    """Write a checkpoint into the existing folder `path`, collectively; see `Saver` for --async-save.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    state = _model_state(chunks)
    if optimizer is not None:
        parameters = [param for chunk in chunks for param in chunk.parameters()]
        state["optimizer"] = _optimizer_state(optimizer, _sharded_parameters(state), parameters, saver)
        state["optimizer_step"] = num_steps(optimizer, parameters[0].device)
    try:
        dist_checkpointing.save(state, str(path), InProcessSave(saver))
    except (OSError, RuntimeError, CheckpointingException, dcp.CheckpointException) as error:
        raise _not_written(path, error) from error


def save_torch(
    path: Path, chunks: Sequence[Any], optimizer: Any | None, shape: ModelShape, placement: Placement, padded_vocab: int
) -> None:
    """Write `mp_rank_TT[_PPP]/model_optim_rng.pt` (--ckpt-format torch) into the existing folder `path`, collectively.

    The weights have the format of Megatron-LM. Its optimizer state has numbers that are valid for one layout of ranks.
    Here each parameter has its states by name, which `megatron_files.py` reads in any layout.

    Raises:
        CheckpointError: the file cannot be written.
    """
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    if numbers := re.findall(r"iter_(\d+)", str(path)):
        state["iteration"] = int(numbers[-1])
    sizes = {"tensor_model_parallel_size": placement.tp_size, "pipeline_model_parallel_size": placement.pp_size}
    state["args"] = megatron_arguments(shape, **sizes, padded_vocab_size=padded_vocab, ckpt_format="torch")
    for name, chunk in _named(chunks).items():
        state[name] = {n: _alone(t) if isinstance(t, Tensor) else t for n, t in chunk.state_dict().items()}
    if optimizer is not None:
        state["optimizer_step"] = num_steps(optimizer, next(chunks[0].parameters()).device)
        state[OPTIMIZER] = {}
        for name, chunk in _named(chunks).items():
            own = {param: n for n, param in chunk.named_parameters()}
            states = whole_states(optimizer, list(own))
            state[OPTIMIZER][name] = {f"{kind}.{own[p]}": t.cpu() for p, kind, t in states if t is not None}
    if placement.copy_rank == 0:
        stage = f"_{placement.pp_rank:03d}" if placement.pp_size > 1 else ""
        folder = path / f"mp_rank_{placement.tp_rank:02d}{stage}"
        try:
            folder.mkdir()
            torch.save(state, folder / RANK_FILE)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            raise _not_written(folder, error) from error


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor on the host in its own storage: `torch.save` writes the whole storage of a view."""
    return tensor.detach().cpu().clone()


def _not_written(path: Path, error: Exception) -> CheckpointError:
    what, remedy = f"the checkpoint was not written: {error}", "make room on the disk, or use another"
    return CheckpointError(what, where=str(path), remedy=remedy)


@torch.no_grad()
def load(
    path: Path,
    shape: ModelShape,
    placement: Placement,
    parameters: dict[str, Tensor],
    optimizer: Any | None,
    *,
    fresh_head: bool = False,
) -> list[str]:
    """Read this rank's part of a Megatron checkpoint of instep or another program, in any layout.

    Args:
        parameters: of `local_parameters`.
        fresh_head: the output layer is not read but becomes zero.

    Returns:
        The names of the tensors of multi-token prediction, which are not read.

    Raises:
        CheckpointError: it is missing, belongs to another model, or its optimizer state cannot be read.
    """
    checkpoint = MegatronCheckpoint(path, shape, fresh_head=fresh_head)
    entries = by_megatron(checkpoint.entries, tied=shape.tied)
    held: Mapping[Tensor, Master] = masters(optimizer) if optimizer is not None else {}
    step = checkpoint.optimizer_step() if optimizer is not None else 0.0
    for megatron, param in parameters.items():
        if fresh_head and megatron == HEAD:
            param.zero_()
            continue
        entry = entries[megatron]
        where = (*placement.split(entry)[:2], param.shape[0])
        param.copy_(checkpoint.local(entry, *where))
        master = held.get(param)
        for name in _names(param) if master is not None else ():
            assert master is not None
            state = checkpoint.local(entry, *where, checkpoint.optimizer_prefix(entry, name)).float()
            piece = master.piece(state)
            if name == "master":
                master.tensor.copy_(piece)
            else:
                master.set_moment(name, piece)
    if optimizer is not None:
        _set_step(optimizer, held, step)
    return checkpoint.mtp


def load_moments(optimizer: Any, moments: Mapping[Tensor, Mapping[str, Tensor]], step: float) -> None:
    """Set moments, in the shapes of this rank's parameters, and the number of steps."""
    held = masters(optimizer)
    for param, named in moments.items():
        if (master := held.get(param)) is not None:
            for name, value in named.items():
                master.set_moment(name, master.piece(value))
    _set_step(optimizer, held, step)


def _set_step(optimizer: Any, held: Mapping[Tensor, Master], step: float) -> None:
    if isinstance(real_optimizers(optimizer)[0].optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        for master in held.values():
            device = master.state["step"].device if "step" in master.state else None
            master.state["step"] = torch.tensor(step, device=device)  # separate: AdamW adds to each
    else:
        for group in optimizer.param_groups:
            group["step"] = int(step)

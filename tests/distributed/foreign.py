"""Checkpoints as Megatron-LM, slime and vime write them, made by Megatron-Core itself from a model of instep's.

Transformer Engine is not needed: the names that its modules have are given to the tensors before they are saved.
"""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def te_name(name: str, names: Any) -> str:
    """The name that Transformer Engine's modules have for the tensor `name`, one of the model's `names`."""
    layer = re.match(r"(decoder\.layers\.(?:\d+\.)?)", name)
    if layer is None:
        return name
    if f"{layer[1]}self_attention.linear_kv_up_proj.weight" in names:  # latent attention
        for x in ("q", "kv"):
            name = name.replace(f"attention.{x}_layernorm.", f"attention.linear_{x}_up_proj.layer_norm_")
    else:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if f"{layer[1]}mlp.router.weight" in names:  # a norm before a router is by itself
        return name
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def arguments() -> argparse.Namespace:
    """Megatron's arguments are saved as a pickled object, with whatever is in it."""
    return argparse.Namespace(params_dtype=torch.bfloat16, exit_signal=signal.SIGTERM, hook=te_name, num_layers=2)


def model_state(backend: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    names = ["model"] if len(backend.chunks) == 1 else [f"model{i}" for i in range(len(backend.chunks))]
    return {n: c.sharded_state_dict(metadata=metadata) for n, c in zip(names, backend.chunks, strict=True)}


def rename(state: dict[str, Any]) -> None:
    """Give all sharded tensors of a state the names that they have in a model of Transformer Engine's modules."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    sharded = [base for base in nested_values(state) if isinstance(base, ShardedBase)]
    keys = {base.key for base in sharded}
    for base in sharded:
        base.key = te_name(base.key, keys)


def load_torch_dist(folder: Path, backend: Any) -> None:
    """Read `folder` into the model as `megatron.training` does, strictly: nothing may be missing or left."""
    from megatron.core import dist_checkpointing, parallel_state

    common = dist_checkpointing.load_common_state_dict(str(folder))
    assert common["args"].num_layers == backend.shape.num_layers and common["checkpoint_version"] == 3.0
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model_state(backend, metadata)
    rename(state)
    loaded, left, missing = dist_checkpointing.load(state, str(folder), strict="return_all")
    # Transformer Engine's modules have a state of their own everywhere, instep's norms and what all ranks have none.
    assert not missing and all(re.search(r"(down_proj|layernorm)\._extra_state", key) for key in left), (missing, left)
    for chunk, name in zip(backend.chunks, state, strict=True):
        chunk.load_state_dict(loaded[name])


def save_torch_dist(folder: Path, backend: Any, *, optimizer: bool = False, **metadata: Any) -> None:
    """Write `folder` as `megatron.training` of core_v0.16.1 does, without its processes; collective."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from instep.training.megatron import cpu_platform
    from instep.training.megatron.checkpoint import InProcessSave
    from instep.training.saving import Saver

    about = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **metadata}
    more = {**about, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model_state(backend, more)
    with cpu_platform.scope():
        if optimizer:
            state["optimizer"] = backend.optimizer.sharded_state_dict(state, metadata=more)
    rename(state)
    state["rng_state"] = ShardedObject("rng_state", [torch.get_rng_state()], (1,), (0,), replica_id=dist.get_rank())
    state |= {"args": arguments(), "iteration": 7, "checkpoint_version": 3.0}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), InProcessSave(Saver(torch.device("cpu"))), content_metadata=about)


def save_torch(folder: Path, backend: Any, *, grouped: bool = False) -> None:
    """Write this rank's file of the format `torch`; with `grouped` experts are those of a grouped GEMM."""
    p = backend.placement
    name = f"mp_rank_{p.tp_rank:02d}" + f"_{p.pp_rank:03d}" * (p.pp_size > 1) + f"_{p.ep_rank:03d}" * (p.ep_size > 1)
    state: dict[str, Any] = {"args": arguments(), "iteration": 7, "checkpoint_version": 3.0}
    for i, chunk in enumerate(backend.chunks):
        weights = chunk.state_dict()
        named = {te_name(key, weights): value for key, value in weights.items()}
        if grouped:
            local = re.compile(r"local_experts\.(\d+)\.(linear_fc\d)\.weight")
            named = {local.sub(r"\2.weight\1", key): value for key, value in named.items()}
        states = {f"{key.removesuffix('weight')}_extra_state" for key in named if key.endswith(".weight")}
        named |= dict.fromkeys(states, torch.empty(0, dtype=torch.uint8))
        state["model" if len(backend.chunks) == 1 else f"model{i}"] = named
    if p.copy_rank == 0 or p.ep_size > 1:
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / name / "model_optim_rng.pt")
    dist.barrier()

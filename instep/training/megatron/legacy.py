"""Model and optimizer in Megatron's older format `torch`: a file of each tensor- and pipeline-parallel rank.

The weights are what Megatron-LM itself writes and loads. Its optimizer's state, which it numbers, would hold for one
layout of ranks; here each parameter has its states by name, which `checkpoints/megatron_files.py` reads under any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoints.megatron_files import OPTIMIZER, RANK_FILE
from instep.checkpoints.megatron_writer import megatron_arguments
from instep.errors import CheckpointError
from instep.models.shape import ModelShape
from instep.training.megatron.checkpoint import num_steps, whole_states
from instep.training.megatron.layout import Placement


def save(
    path: Path,
    chunks: Sequence[Any],
    optimizer: Any | None,
    shape: ModelShape,
    placement: Placement,
    padded_vocab: int,
) -> None:
    """Write `mp_rank_TT[_PPP]/model_optim_rng.pt` into the existing folder `path`, collectively.

    Raises:
        CheckpointError: the file cannot be written.
    """
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    if numbers := re.findall(r"iter_(\d+)", str(path)):
        state["iteration"] = int(numbers[-1])
    sizes = {"tensor_model_parallel_size": placement.tp_size, "pipeline_model_parallel_size": placement.pp_size}
    state["args"] = megatron_arguments(shape, **sizes, padded_vocab_size=padded_vocab, ckpt_format="torch")
    for name, chunk in zip(names, chunks, strict=True):
        state[name] = {n: _alone(t) if isinstance(t, Tensor) else t for n, t in chunk.state_dict().items()}
    if optimizer is not None:
        state["optimizer_step"] = num_steps(optimizer, next(chunks[0].parameters()).device)
        state[OPTIMIZER] = {}
        for name, chunk in zip(names, chunks, strict=True):
            own = {param: n for n, param in chunk.named_parameters()}
            states = whole_states(optimizer, list(own))
            state[OPTIMIZER][name] = {f"{kind}.{own[p]}": t.cpu() for p, kind, t in states if t is not None}
    if placement.copy_rank == 0:
        stage = f"_{placement.pp_rank:03d}" if placement.pp_size > 1 else ""
        folder = path / f"mp_rank_{placement.tp_rank:02d}{stage}"
        try:
            folder.mkdir()
            torch.save(state, folder / RANK_FILE)
        except (OSError, RuntimeError) as error:  # torch.save says RuntimeError on a full disk
            what = f"the checkpoint was not written: {error}"
            raise CheckpointError(what, where=str(folder), remedy="make room on the disk, or use another") from error


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the host, over a storage of its own: of a view, `torch.save` writes all that it lies in."""
    return tensor.detach().cpu().clone()

"""The place of this process in Megatron's layout of ranks, and the process groups of that layout."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from instep.arguments.settings import ParallelSettings, Settings
from instep.errors import ConfigError
from instep.models.shape import ModelShape
from instep.models.stages import num_chunks, stage_layers
from instep.models.weight_map import Kind, WeightEntry
from instep.training.backend import ParallelInfo
from instep.training.megatron import cpu_platform


@dataclass
class Placement:
    """The part of the model on this process. Groups are torch.distributed's.

    The layers are cut into pp_size x num_chunks chunks, which go to the stages in turn.

    Attributes:
        num_chunks: of each stage; more than one if the pipeline is interleaved (virtual stages).
        copy_rank: the number of this copy of the weights, over data- and context-parallel ranks.
        expert_copy_rank: the same for its experts. They have another layout on the same ranks: data-, expert- and
            expert-tensor-parallel.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    num_chunks: int
    cp_rank: int
    cp_size: int
    copy_rank: int
    tp_group: Any
    pp_group: Any
    stage_layers: list[int]  # of each stage
    num_experts: int  # of a layer; 0: no layer has experts
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    expert_copy_rank: int
    ep_group: Any
    etp_group: Any

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size

    def first_layer(self, chunk: int) -> int:
        """Return the number of layers before this rank's chunk `chunk`: each chunk has its part of all stages."""
        return (chunk * sum(self.stage_layers) + sum(self.stage_layers[: self.pp_rank])) // self.num_chunks

    def begins(self, chunk: int) -> bool:
        """Return whether this rank's chunk `chunk` has the embedding."""
        return self.pp_rank == 0 and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Return whether this rank's chunk `chunk` has the output layer."""
        return self.pp_rank == self.pp_size - 1 and chunk == self.num_chunks - 1

    def split(self, entry: WeightEntry) -> tuple[int, int, Any]:
        """Return rank, size and group that split the weights of `entry`."""
        if entry.expert is None:
            return self.tp_rank, self.tp_size, self.tp_group
        return self.etp_rank, self.etp_size, self.etp_group

    def stage(self, entry: WeightEntry) -> int:
        """Return the pipeline stage that holds `entry` (for tied weights the first one)."""
        if entry.layer is not None:
            within = entry.layer * self.num_chunks % sum(self.stage_layers)
            return bisect_right(list(accumulate(self.stage_layers)), within)
        return 0 if entry.kind is Kind.VOCAB and entry.megatron.startswith("embedding.") else self.pp_size - 1


def expert_tensor_parallel_size(args: ParallelSettings) -> int:
    """Return the size for experts; by default that of the other layers, as in Megatron."""
    return args.expert_tensor_parallel_size or args.tensor_model_parallel_size


def initialise(args: Settings, shape: ModelShape, device: torch.device) -> tuple[Placement, ParallelInfo]:
    """Make Megatron's process groups, once per process for all its models. Return the place of this rank in them.

    Raises:
        ConfigError: the groups of an earlier model have other sizes.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    num_layers, num_experts = shape.num_layers, shape.experts.num if shape.experts else 0
    chunks, ep, etp = num_chunks(args, num_layers), args.expert_model_parallel_size, expert_tensor_parallel_size(args)
    if not ps.model_parallel_is_initialized():
        virtual = chunks if chunks > 1 else None
        ps.initialize_model_parallel(
            tp,
            pp,
            virtual,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,
        )
    now = (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        ps.get_context_parallel_world_size(),
        ps.get_expert_model_parallel_world_size(),
        ps.get_expert_tensor_parallel_world_size(),
    )
    if now != (tp, pp, chunks, cp, ep, etp):
        raise ConfigError(
            "two models of one process need different tensor, pipeline, virtual pipeline, context, expert and expert "
            f"tensor parallel sizes: {now} and {(tp, pp, chunks, cp, ep, etp)}",
            remedy="use the same sizes for all models of a worker, and --num-virtual-stages-per-pipeline-rank if "
            "they differ in layers",
            where="the parallel sizes of the trainer",
        )
    torch.manual_seed(args.seed)
    with cpu_platform.scope():
        model_parallel_cuda_manual_seed(args.seed)
    placement = Placement(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=tp,
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=pp,
        num_chunks=chunks,
        cp_rank=ps.get_context_parallel_rank(),
        cp_size=cp,
        copy_rank=ps.get_data_parallel_rank(with_context_parallel=True),
        tp_group=ps.get_tensor_model_parallel_group(),
        pp_group=ps.get_pipeline_model_parallel_group(),
        stage_layers=stage_layers(args, num_layers),
        num_experts=num_experts,
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ep,
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp_size=etp,
        expert_copy_rank=ps.get_expert_data_parallel_rank(),
        ep_group=ps.get_expert_model_parallel_group(),
        etp_group=ps.get_expert_tensor_parallel_group(),
    )
    last = placement.pp_rank == pp - 1
    parallel = ParallelInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        micro_batch_multiple=pp if chunks > 1 else 1,  # the interleaved schedule distributes them over the stages
        is_last_stage=last,
        is_output_rank=last and placement.tp_rank == 0 and placement.cp_rank == 0,
        dp_group=ps.get_data_parallel_group(),
        device=device,
    )
    return placement, parallel

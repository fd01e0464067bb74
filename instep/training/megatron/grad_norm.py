"""The norm of all gradients of a model that Megatron's ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from instep.models.shape import ModelShape

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def grad_norm(optimizer: Any, args: Settings, shape: ModelShape, device: torch.device) -> float:
    """Return the norm over the whole model, in which a parameter on several ranks counts once (collective).

    Experts have their own distribution over ranks. A stage without experts has no optimizer for them.
    """
    from megatron.core import parallel_state as ps

    squares = torch.zeros(2, device=device)  # without experts, of experts
    for opt in optimizer.chained_optimizers:
        grads = opt.get_main_grads_for_grad_norm()
        if grads:
            of_experts = int(opt.param_groups[0]["is_expert_parallel"])
            squares[of_experts] += torch.stack(torch._foreach_norm(grads)).square().sum()
    if args.use_distributed_optimizer:
        dist.all_reduce(squares, group=ps.get_intra_distributed_optimizer_instance_group())
    else:
        dist.all_reduce(squares[:1], group=ps.get_model_parallel_group())
        if shape.experts:
            dist.all_reduce(squares[1:], group=ps.get_expert_tensor_model_pipeline_parallel_group())
    return float(squares.sum().sqrt())

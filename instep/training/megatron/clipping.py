"""Gradient norms over the whole model, and clipping, for the policy and its drafter (multi-token prediction) apart.

So the drafter's gradients change nothing in the training of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.arguments.settings import Settings
from instep.models.shape import ModelShape


def clip(
    optimizer: Any, drafter: Collection[Tensor], args: Settings, shape: ModelShape, device: torch.device
) -> tuple[float, float]:
    """Scale the gradients of policy and drafter to `--clip-grad` where their norms are larger; return the norms
    (collective).

    In a norm, a parameter on several ranks counts once. Nothing is scaled if a norm is not finite.

    Args:
        drafter: its parameters on this rank.
    """
    limit, experts = args.clip_grad, shape.experts is not None
    apart = _of_drafter(optimizer, drafter)
    found = _norms(optimizer, apart, bool(args.use_distributed_optimizer), experts, device)
    if limit and all(map(math.isfinite, found)):
        params = [p for opt in optimizer.chained_optimizers for p in opt.get_parameters()]
        for whose, norm in enumerate(found):
            grads = [p.grad for p in params if p.grad is not None and (id(p.grad) in apart) == whose]
            if norm > limit and grads:  # a rank may lack the drafter
                torch._foreach_mul_(grads, limit / (norm + 1e-6))
    return found


def _of_drafter(optimizer: Any, drafter: Collection[Tensor]) -> set[int]:
    """Return the ids of the gradients that the optimizer has for these parameters of the model."""
    from instep.training.megatron.checkpoint import masters

    held = masters(optimizer) if drafter else {}
    return {id(held[param].tensor.grad) for param in drafter if param in held}


def _norms(
    optimizer: Any, apart: set[int], distributed: bool, experts: bool, device: torch.device
) -> tuple[float, float]:
    """Experts have their own distribution over ranks. A stage without experts has no optimizer for them."""
    from megatron.core import parallel_state as ps

    squares = torch.zeros(2, 2, device=device)  # without experts, of experts; of policy, of drafter
    for opt in optimizer.chained_optimizers:
        grads = opt.get_main_grads_for_grad_norm()
        for whose in range(2):
            if some := [grad for grad in grads if (id(grad) in apart) == whose]:
                of_experts = int(opt.param_groups[0]["is_expert_parallel"])
                squares[of_experts, whose] += torch.stack(torch._foreach_norm(some)).square().sum()
    if distributed:
        dist.all_reduce(squares, group=ps.get_intra_distributed_optimizer_instance_group())
    else:
        dist.all_reduce(squares[0], group=ps.get_model_parallel_group())
        if experts:
            dist.all_reduce(squares[1], group=ps.get_expert_tensor_model_pipeline_parallel_group())
    policy, drafted = squares.sum(0).sqrt().tolist()
    return policy, drafted

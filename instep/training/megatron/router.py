"""The router of Megatron's mixtures of experts, with auxiliary losses that do not depend on the layout of ranks.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from instep.training.backend import ParallelInfo
from instep.training.megatron.replay import Replay
from instep.types import TokenBatch


class Router(TopKRouter):
    """Megatron's router; its losses are means over the tokens of the whole optimizer step.

    Megatron scales them for gradients that are divided by a number of tokens at the end. Here they are not divided.

    - Balance (Fedus et al. 2021, arXiv 2101.03961): E sum_i f_i P_i, where f_i is the fraction of a micro-batch's
      choices of expert i, and P_i the mean probability of expert i. If scores are sigmoids, a token's scores are
      divided by their sum, without the bias of the choice.
    - z-loss (Zoph et al. 2022, arXiv 2202.08906): the mean of logsumexp(logits)^2.

    With sigmoids, the bias of the choice grows for experts with fewer tokens than the mean in an optimizer step, by
    `--moe-router-bias-update-rate` (Wang et al. 2024, arXiv 2408.15664). Bias and counts stay float32 in any model.

    Attributes:
        per_token: 1 / tokens of the optimizer step, over all micro-batches and data-parallel ranks.
    """

    per_token: float = 0.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.router_replay = Replay()

    def is_aux_loss_enabled(self) -> bool:
        return False  # as Megatron does

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens. Megatron's own fails on a mask: its shape does not fit the map's."""
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():  # in bfloat16 a count of tokens ends at 256
            setattr(self, name, buffer.float())
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        config, learns = self.config, self.training and torch.is_grad_enabled()
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        flat = logits.view(-1, config.num_moe_experts)
        if learns and config.moe_z_loss_coeff:
            squares = flat.float().logsumexp(-1).square()
            if padding is not None:
                squares = squares.masked_fill(padding, 0.0)
            flat = MoEAuxLossAutoScaler.apply(flat, config.moe_z_loss_coeff * self.per_token * squares.sum())
        probs, routing_map = super().routing(flat.view(logits.shape), padding_mask)
        if self.score_function == "sigmoid":  # Megatron's weights sum to 1, unless there is one expert
            scores = flat.float().sigmoid() * routing_map
            if not config.moe_router_pre_softmax:
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            probs = (scores * config.moe_router_topk_scaling_factor).type_as(probs)
        if learns and config.moe_aux_loss_coeff:
            chosen, scores = compute_routing_scores_for_aux_loss(
                flat, self.topk, self.score_function, padding_mask=padding
            )
            counts = chosen.sum(0).float()
            dist.all_reduce(counts, group=self.tp_cp_group)  # over the ranks that share the micro-batch
            mean = (counts / counts.sum() * scores.sum(0)).sum() * self.per_token
            probs = MoEAuxLossAutoScaler.apply(probs, config.moe_aux_loss_coeff * config.num_moe_experts * mean)
        return probs, routing_map


def weigh_losses(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[TokenBatch], ranks: ParallelInfo) -> None:
    """Give the routers of experts the number of tokens in the step, for the means in their losses; collective."""
    count = torch.tensor([b.tokens.numel() for b in micro_batches], device=ranks.device).sum()
    dist.all_reduce(count, group=ranks.dp_group)
    for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, Router)):
        module.per_token = 1.0 / int(count)

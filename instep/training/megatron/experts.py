"""Megatron's experts with grouped matrix products (--moe-grouped-gemm), without Transformer Engine, and shared experts.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from instep.training.adjacent import lay_out
from instep.training.grouped import grouped_linear
from instep.training.megatron.lora import add_grouped


@jit_fuser
def _activated(x: Tensor, probs: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)


class OnOneRank(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher if a rank has all experts, whole: sort tokens by expert, and restore their order.

    Unlike Megatron's own, it does not wait for the device to count tokens. Tokens are copied once instead of twice, and
    results are summed in float32 in a fixed order, not by atomic additions in the weights' type.
    """

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of each expert, in the order of experts, then tokens, and their weights."""
        self.hidden_shape = hidden.shape
        self.tokens_per_expert = routing_map.sum(0)
        chosen = routing_map.to(torch.uint8).topk(self.config.moe_router_topk, dim=-1, sorted=False).indices
        experts = chosen.sort().values  # the same number for each token
        order = experts.flatten().sort(stable=True).indices
        self.token = order // experts.shape[1]
        self.places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        self.places = self.places.view_as(experts)
        rows: Tensor = _ToExperts.apply(hidden.view(-1, hidden.shape[-1]), self.token, self.places)
        return rows, probs.gather(1, experts).flatten().index_select(0, order)

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        return rows

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        out: Tensor = _FromExperts.apply(rows, self.token, self.places)
        return out.view(self.hidden_shape)

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return rows, probs

    def token_combine(self, rows: Tensor, *_: Any, **__: Any) -> Tensor:
        return rows


class _ToExperts(torch.autograd.Function):
    """Computes `rows[token]`; `places` `[num_tokens, experts per token]` has the places of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, *ctx.saved_tensors), None, None


class _FromExperts(torch.autograd.Function):
    """The sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _summed(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    return rows.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1)


class GroupedExperts(SequentialMLP):
    """The experts of a rank with the weights of Megatron's `SequentialMLP`, under the same names, computed together.

    Attributes:
        adds_gradients: see `grouped_linear`.
    """

    adds_gradients = False

    def lay_out(self) -> None:
        """Put the weights of all experts into one memory, so that no pass copies them."""
        for name in ("linear_fc1", "linear_fc2"):
            lay_out([getattr(expert, name).weight for expert in self.local_experts])

    def train_together(self) -> None:
        """Add gradients for all experts at once, if all are trained."""
        self.adds_gradients = all(hasattr(weight, "main_grad") for weight in self.parameters())

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute `[num_tokens, hidden]`, in the order of experts, and counts per expert -> `[num_tokens, hidden]`.

        Without any rows, the experts compute the product themselves.
        """
        if not len(hidden):
            alone: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
            return alone
        ends = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        wide = self._linear("linear_fc1", hidden, ends)
        if self.config.recompute_granularity != "selective" or "moe_act" not in self.config.recompute_modules:
            return self._linear("linear_fc2", _activated(wide, probs), ends), None
        again = CheckpointWithoutOutput(fp8=None)  # False counts as FP8 there
        out = self._linear("linear_fc2", again.checkpoint(_activated, wide, probs), ends)
        again.discard_output_and_register_recompute(out)
        return out, None

    def _linear(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        layers = [getattr(expert, name) for expert in self.local_experts]
        out = grouped_linear(x, ends, [layer.weight for layer in layers], adds_gradients=self.adds_gradients)
        adapters = [layer.adapter for layer in layers if "adapter" in layer._modules]
        return add_grouped(adapters, x, ends, out) if adapters else out


class Gate(MegatronModule):
    """Computes the logits of the gate. Its weight stays that of the shared experts, under Megatron's name."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)


class SharedExperts(SharedExpertMLP):
    """The experts that every token uses, with the weights of Megatron's class."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gate = Gate(self.config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute `[num_tokens, 1, hidden]` -> the same."""
        out: Tensor = MLP.forward(self, hidden)[0]
        return out * self.gate(hidden, self.gate_weight).sigmoid() if self.use_shared_expert_gate else out

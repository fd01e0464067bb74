"""The gated delta net (Yang et al. 2024, arXiv 2412.06464) of Qwen3-Next and Qwen3.5 on a packed stream.

Tensor-parallel ranks share the key heads, each with its value heads. Rows of the projection and channels of the
convolution are ordered by key head, so a rank's part is contiguous. A key head has its query, key, values and output
gates, then the inputs of each value's share (beta) and decay (alpha). Megatron's own module orders a rank's rows by
kind. So its names, `in_proj` and `conv1d`, are not used here.

Context-parallel ranks share the key heads of a tensor-parallel rank in the convolution and the delta rule. One
all-to-all gives each rank the whole stream of some heads (Jacobs et al. 2023, arXiv 2309.14509); a second one returns
the rank's own tokens. No rank repeats the work of another one.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from instep.training.delta_net import causal_conv, gated_delta_rule

_SPLIT = {"A_log": 0, "dt_bias": 0, "conv_heads.weight": 0}  # parameters of single heads, and the dimension of heads


class GatedDeltaNet(MegatronModule):
    """The module of a layer in place of attention. Each sample starts with an empty state."""

    def __init__(self, config: TransformerConfig, pg_collection: Any, **_: Any):
        super().__init__(config)
        self.tp_group, self.cp_group, tp = pg_collection.tp, pg_collection.cp, pg_collection.tp.size()
        self.key_heads, value_heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        self.per_key = value_heads // self.key_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        values = config.linear_num_value_heads * self.value_dim
        mixed = 2 * config.linear_num_key_heads * self.key_dim + values
        where: dict[str, Any] = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
        how: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group)
        rows = mixed + values + 2 * config.linear_num_value_heads
        self.in_heads = ColumnParallelLinear(config.hidden_size, rows, gather_output=False, **how)
        channels, width = mixed // tp, config.linear_conv_kernel_dim
        self.conv_heads = torch.nn.Conv1d(channels, channels, width, groups=channels, bias=False, **where)
        self.A_log = torch.nn.Parameter(torch.zeros(value_heads, **where))
        self.dt_bias = torch.nn.Parameter(torch.ones(value_heads, **where))
        for name, dim in _SPLIT.items():
            set_tensor_model_parallel_attributes(self.get_parameter(name), True, dim, 1)
        self.out_norm = torch.nn.RMSNorm(self.value_dim, config.layernorm_epsilon, **where)
        self.out_proj = RowParallelLinear(values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **how)

    def forward(self, hidden: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> tuple[Tensor, None]:
        """Compute `[num_tokens, 1, hidden]` -> the same; with sequence parallelism, of this rank's part of the
        tokens."""
        p, keys, values = packed_seq_params, self.key_dim, self.per_key * self.value_dim
        heads = self.in_heads(hidden)[0][:, 0].unflatten(-1, (self.key_heads, -1))  # [num_tokens, key heads, ...]
        mixed, gate, numbers = heads.split([2 * keys + values, values, 2 * self.per_key], dim=-1)
        if p.order is None:
            out = self._delta_rule(mixed, numbers, p.cu_seqlens_kv, 0)
        else:
            whole = _stream_of_heads(torch.cat([mixed, numbers], dim=-1), p.order, self.cp_group)
            mixed, numbers = whole.split([2 * keys + values, 2 * self.per_key], dim=-1)
            out = self._delta_rule(mixed, numbers, p.cu_samples, self.cp_group.rank() * mixed.shape[1])
            out = _own_tokens(out, p.order, self.cp_group)
        # A rank has the gradient of its own heads: it is summed over the ranks that share them.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        out = _gated_norm(out, gate.reshape(out.shape), weight, self.config.layernorm_epsilon)
        return self.out_proj(out.flatten(1)[:, None])[0], None

    def _delta_rule(self, mixed: Tensor, numbers: Tensor, bounds: Tensor, first: int) -> Tensor:
        """Compute `[num_tokens, key heads, ...]` of the key heads from `first` on -> `[num_tokens, value heads,
        value_dim]`."""
        key_heads = mixed.shape[1]
        last = first + key_heads
        own = slice(first * self.per_key, last * self.per_key)
        weight = self.conv_heads.weight[:, 0].unflatten(0, (self.key_heads, -1))[first:last].flatten(0, 1)
        mixed = causal_conv(mixed.flatten(1)[None], weight, None, bounds, "silu").unflatten(-1, (key_heads, -1))
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.per_key * self.value_dim], dim=-1)
        value = value.reshape(*value.shape[:2], -1, self.value_dim)
        beta, alpha = (x.flatten(1)[None] for x in numbers.chunk(2, dim=-1))
        decay, share = _decay_and_share(alpha, self.A_log[own], self.dt_bias[own], beta)
        return gated_delta_rule(query.contiguous(), key.contiguous(), value, decay, share, bounds)[0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        whole: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = {name: self.get_parameter(name) for name in _SPLIT}
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return whole | make_sharded_tensors_for_checkpoint(split, prefix, _SPLIT, sharded_offsets, **groups)


def _stream_of_heads(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """Move all heads of this rank's tokens, `[num_local, heads, ...]`, to this rank's heads of all tokens, in the order
    of the stream."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return all_to_all(group, parts).flatten(0, 1).index_select(0, order)


def _own_tokens(x: Tensor, order: Tensor, group: Any) -> Tensor:
    """Do the inverse of `_stream_of_heads`."""
    parts = torch.empty_like(x).index_copy(0, order, x).unflatten(0, (group.size(), -1))
    return all_to_all(group, parts).transpose(0, 1).flatten(1, 2)


@jit_fuser
def _decay_and_share(alpha: Tensor, log_rate: Tensor, bias: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, in float32, and the share of a value that is written."""
    decay = -log_rate.float().exp() * torch.nn.functional.softplus(alpha.float() + bias.float())
    return decay, beta.sigmoid()


@jit_fuser
def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * torch.nn.functional.silu(gate.float())).to(x.dtype)

"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.1) on a packed stream.

Parameters have the names and layouts of Megatron's own module with Transformer Engine: projections to latent vectors
are whole on every tensor-parallel rank. Megatron's module without Transformer Engine splits them. Its gradient of the
rotary part of the keys, which all heads share, covers only each rank's own heads.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from instep.training.megatron.rotary import rotate


def latent_attention(core: type, norm: type) -> ModuleSpec:
    """Return the module of a layer's attention.

    Args:
        core: of rotated queries and keys, and values, `[num_tokens, heads, dim]` each.
        norm: of the latent vectors.
    """
    parts = MLASelfAttentionSubmodules(
        core_attention=core, linear_proj=RowParallelLinear, q_layernorm=norm, kv_layernorm=norm
    )
    return ModuleSpec(LatentAttention, {"attn_mask_type": AttnMaskType.causal}, parts)


class Down(torch.nn.Linear):
    """A projection of the hidden states to a latent vector. The attribute of the weight makes `finalize_model_grads`
    sum its gradient over ranks with parts of the sequence."""

    def __init__(self, config: MLATransformerConfig, width: int):
        device, dtype = torch.cuda.current_device(), config.params_dtype
        super().__init__(config.hidden_size, width, bias=False, device=device, dtype=dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class LatentAttention(MultiLatentAttention):
    """Megatron's attention with rotary positions of packed sequences, for either convention of rotated pairs."""

    def __init__(self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, **kwargs: Any):
        super().__init__(config, submodules, attention_type="self", **kwargs)
        heads, norm_eps = config.num_attention_heads, config.layernorm_epsilon
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(config.hidden_size, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = Down(config, config.q_lora_rank)
            self.q_layernorm = submodules.q_layernorm(config, config.q_lora_rank, norm_eps)
            self.linear_q_up_proj = self._up(config.q_lora_rank, heads * self.q_head_dim)
        self.linear_kv_down_proj = Down(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = submodules.kv_layernorm(config, config.kv_lora_rank, norm_eps)
        self.linear_kv_up_proj = self._up(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))

    def _up(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """Build a projection from the input of all tensor-parallel ranks to the heads of each."""
        how: dict[str, Any] = dict(config=self.config, init_method=self.config.init_method, bias=False)
        return ColumnParallelLinear(inputs, outputs, gather_output=False, tp_group=self.pg_collection.tp, **how)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None, position_ids: None, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor | None, ...]:
        """Return rotated queries and keys, and values, `[num_tokens, heads of this rank, dim]` each."""
        c, p = self.config, packed_seq_params
        if c.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        latent, shared = self.linear_kv_down_proj(hidden_states).split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        if c.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.pg_collection.tp)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        both = self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        query, both = (x.view(x.shape[0], self.num_attention_heads_per_partition, -1) for x in (query, both))
        content, rotary = query.split([c.qk_head_dim, c.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat([content, _rotate(rotary, p)], dim=-1)
        content, value = both.split([c.qk_head_dim, c.v_head_dim], dim=-1)
        rotary = _rotate(shared, p).expand(-1, content.shape[1], -1)
        return query, torch.cat([content, rotary], dim=-1), value, None, None


def _rotate(x: Tensor, p: Any) -> Tensor:
    if p.interleaved:  # `rotate` takes halves; scores do not depend on the order of a head's numbers
        x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    return rotate(x, p.cos, p.sin)

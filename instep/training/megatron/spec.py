"""The Megatron-Core GPTModel of instep: packed sequences without Transformer Engine or apex.

Imports `megatron.core`, so it must itself be imported after `cpu_platform.install()` where there is no CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from instep.training.log_probs import log_probs_and_entropy, values
from instep.training.packed_attention import packed_attention
from instep.training.packing import (
    cu_seqlens,
    position_ids,
    response_positions,
    response_targets,
    response_temperatures,
)
from instep.types import TokenBatch

# The number of logits that exist at a time: 1 GiB in float32, of which the head needs several copies.
HEAD_LOGITS = 2**28


class Rope:
    """Rotary positions with Hugging Face's own frequencies (Su et al. 2021, arXiv 2104.09864, and its scalings).

    Megatron's are not used: they loop over the packed sequences, in every layer, and know fewer scalings.
    """

    def __init__(self, hf_config: Any, head_dim: int, device: torch.device):
        rope = hf_config.rope_parameters
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
            self.inv_freq, self.scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            self.inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, None)
        self.inv_freq = self.inv_freq.to(device)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[num_tokens]` -> cos, sin `[num_tokens, 1, head_dim]`."""
        angles = torch.outer(positions.float(), self.inv_freq).repeat(1, 2)[:, None]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


@jit_fuser
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


@dataclass(kw_only=True)
class PackedInput(PackedSeqParams):
    """A micro-batch as it travels through Megatron's layers, from the embedding to the log-probs."""

    tokens: Tensor  # int64 [1, num_tokens], with trailing padding if sequence parallelism needs it
    cos: Tensor
    sin: Tensor
    positions: Tensor  # whose logits predict a response token
    targets: Tensor
    temperature: Tensor  # of each response token
    with_entropy: bool
    with_logits: bool


def pack(
    batch: TokenBatch, rope: Rope, *, dtype: torch.dtype, multiple: int, with_entropy: bool, with_logits: bool = False
) -> PackedInput:
    """`batch` (on its device) as Megatron's input; the stream is padded to `multiple` by a segment of its own."""
    bounds, longest = cu_seqlens(batch)
    positions, tokens = position_ids(batch), batch.tokens
    padding = -tokens.numel() % multiple
    if padding:
        bounds = torch.cat([bounds, bounds[-1:] + padding])
        tokens = torch.nn.functional.pad(tokens, (0, padding))
        positions = torch.cat([positions, torch.arange(padding, device=positions.device)])
        longest = max(longest, padding)
    cos, sin = rope.cos_sin(positions, dtype)
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens=tokens[None],
        cos=cos,
        sin=sin,
        positions=response_positions(batch),
        targets=response_targets(batch),
        temperature=response_temperatures(batch),
        with_entropy=with_entropy,
        with_logits=with_logits,
    )


class RMSNorm(torch.nn.RMSNorm):
    """The norm of the residual stream. Megatron's torch norm refuses sequence parallelism; the attribute of the weight
    makes `finalize_model_grads` add up its gradient over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class HeadRMSNorm(torch.nn.RMSNorm):
    """The norm of queries and keys; Megatron adds up its gradient by name (`q_layernorm`, `k_layernorm`)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())


class PackedCoreAttention(MegatronModule):
    """Rotary positions and causal attention within each sequence of a packed stream."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedInput,
                **__: Any) -> Tensor:  # fmt: skip
        """`[num_tokens, heads, head_dim]` each -> `[num_tokens, heads * head_dim]`."""
        p = packed_seq_params
        query, key = _rotate(query, p.cos, p.sin), _rotate(key, p.cos, p.sin)
        out = packed_attention(
            query, key, value, cu_seqlens=p.cu_seqlens_q, max_seqlen=p.max_seqlen_q, scale=self.scale
        )
        return out.flatten(1)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with the norms and the core attention of this file."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


class PolicyModel(GPTModel):
    """A GPTModel that returns the fields of `TokenOutputs` for response tokens instead of logits of all tokens."""

    def __init__(
        self, config: TransformerConfig, *, padded_vocab: int, vocab_size: int, value_head: bool, **kwargs: Any
    ):
        super().__init__(
            config, block_spec(config), vocab_size=padded_vocab, position_embedding_type="none", **kwargs
        )  # the core attention rotates
        self.real_vocab_size, self.value_head = vocab_size, value_head
        if self.post_process and value_head:
            # Every tensor-parallel rank has the head and all of its input, so that nothing is to be reduced.
            device, dtype = torch.cuda.current_device(), config.params_dtype
            self.output_layer = torch.nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=dtype)
        elif self.post_process:
            # The head sees few positions: they are gathered first, and its input gradient is all-reduced.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInput, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        p, config = packed_seq_params, self.config
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        if p.with_logits:  # without tensor parallelism
            logits = self._logits(hidden_states)[:, : self.real_vocab_size].float()
            scores, size = logits[p.positions], self.real_vocab_size
            outputs = log_probs_and_entropy(
                scores, p.targets, p.temperature, vocab_size=size, with_entropy=p.with_entropy
            )
            return *outputs, logits[None]
        hidden = hidden_states[p.positions]
        if self.value_head:
            return hidden.new_empty(0), None, None, values(hidden[:, 0], self.output_layer.weight)
        size = max(1, HEAD_LOGITS * config.tensor_model_parallel_size // self.vocab_size)
        chunks = zip(hidden.split(size), p.targets.split(size), p.temperature.split(size), strict=True)
        if hidden.shape[0] > size and torch.is_grad_enabled():
            parts = [checkpoint(self._head, *chunk, p.with_entropy, use_reentrant=False) for chunk in chunks]
        else:
            parts = [self._head(*chunk, p.with_entropy) for chunk in chunks]
        log_probs = torch.cat([part[0] for part in parts])
        return log_probs, torch.cat([part[1] for part in parts]) if p.with_entropy else None

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        group = self.pg_collection.tp if self.config.tensor_model_parallel_size > 1 else None
        return log_probs_and_entropy(
            self._logits(hidden), targets, temperature, vocab_size=self.real_vocab_size, tp_group=group,
            with_entropy=with_entropy,
        )  # fmt: skip

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[num_tokens, 1, hidden]` -> this rank's columns, `[num_tokens, V_local]`."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0][:, 0]

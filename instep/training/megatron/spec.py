"""The Megatron-Core GPTModel of instep: packed sequences without Transformer Engine or apex.

Imports `megatron.core`: without CUDA, only after `cpu_platform.install()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import LNImpl, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from instep.checkpoints.megatron_files import FUSED
from instep.training.context_parallel import share_of, shared_attention, whole
from instep.training.log_probs import in_chunks, log_probs_and_entropy, values
from instep.training.megatron.experts import GroupedExperts, OnOneRank, SharedExperts
from instep.training.megatron.gated_delta_net import GatedDeltaNet
from instep.training.megatron.latent_attention import latent_attention
from instep.training.megatron.mtp import MultiTokenPrediction
from instep.training.megatron.norms import HeadRMSNorm, RMSNorm
from instep.training.megatron.replay import before_layer
from instep.training.megatron.rotary import Rope, rotate
from instep.training.megatron.router import Router
from instep.training.packed_attention import packed_attention, rows
from instep.training.packing import (
    SharedPrefixes,
    cu_seqlens,
    position_ids,
    response_positions,
    response_targets,
    response_temperatures,
)
from instep.types import TokenBatch

# The number of logits at a time on a rank; they and their gradients need at most 2 GiB.
HEAD_LOGITS = 2**28


@dataclass(kw_only=True)
class PackedInput(PackedSeqParams):
    """A micro-batch on its path through Megatron's layers, from the embedding to the log-probs."""

    tokens: Tensor  # int64 [1, num_tokens], with padding at the end if sequence parallelism needs it
    rows: Tensor  # int64 [num_tokens]: their places in the batch; padding repeats a token
    cos: Tensor
    sin: Tensor
    interleaved: bool  # see `Rope`
    positions: Tensor  # whose logits predict a response token
    targets: Tensor
    temperature: Tensor  # of each response token
    with_entropy: bool
    with_logits: bool
    padding: Tensor | None = None  # bool [1, num_tokens], if there is any
    shared: SharedPrefixes | None = None  # context parallelism: see `context_parallel.Share`
    order: Tensor | None = None
    cu_samples: Tensor | None = None
    own: Tensor | None = None
    num_response_tokens: int = 0
    routes: Tensor | None = None  # see `replay.routes_of`
    noted: dict[int, Tensor] | None = None  # gets the experts that each layer chooses
    chosen: dict[int, Tensor] | None = None  # the choices of an earlier pass


def pack(
    batch: TokenBatch,
    rope: Rope,
    *,
    dtype: torch.dtype,
    multiple: int,
    with_entropy: bool,
    with_logits: bool = False,
    cp: tuple[int, int] = (0, 1),
) -> PackedInput:
    """Return `batch` (on its device) as Megatron's input; a separate segment pads the stream to `multiple`.

    Args:
        cp: context-parallel rank and size; the result is this rank's share of the stream.
    """
    if cp[1] > 1:
        return _pack_share(batch, rope, dtype, multiple, with_entropy, cp)
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
        rows=torch.arange(tokens.numel(), device=tokens.device).clamp(max=batch.tokens.numel() - 1),
        cos=cos,
        sin=sin,
        interleaved=rope.interleaved,
        positions=response_positions(batch),
        targets=response_targets(batch),
        temperature=response_temperatures(batch),
        with_entropy=with_entropy,
        with_logits=with_logits,
        padding=torch.arange(tokens.numel(), device=tokens.device)[None] >= batch.tokens.numel() if padding else None,
    )


def _pack_share(
    batch: TokenBatch, rope: Rope, dtype: torch.dtype, multiple: int, with_entropy: bool, cp: tuple[int, int]
) -> PackedInput:
    share = share_of(batch, *cp, multiple)
    cos, sin = rope.cos_sin(share.positions, dtype)
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=share.shared.cu_kept,
        cu_seqlens_kv=share.cu_seqlens,
        max_seqlen_q=share.shared.max_kept,
        max_seqlen_kv=share.max_seqlen,
        tokens=batch.tokens[share.rows][None],
        rows=share.rows,
        cos=cos,
        sin=sin,
        interleaved=rope.interleaved,
        positions=share.predicting,
        targets=response_targets(batch)[share.own],
        temperature=response_temperatures(batch)[share.own],
        with_entropy=with_entropy,
        with_logits=False,
        padding=share.padding[None],
        shared=share.shared,
        order=share.order,
        cu_samples=share.cu_samples,
        own=share.own,
        num_response_tokens=int(batch.response_lengths.sum()),
    )


class PackedCoreAttention(MegatronModule):
    """Rotary positions (latent attention rotates parts of its heads itself) and causal attention within each sequence
    of a packed stream."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__(config=config)
        self.scale = softmax_scale

    def get_extra_state(self) -> None:
        """Return None: checkpoints have an entry for it, as Transformer Engine's attention requires one."""

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedInput,
                **__: Any) -> Tensor:  # fmt: skip
        """Compute `[num_tokens, heads, head_dim]` each -> `[num_tokens, heads * head_dim]`; values may be narrower."""
        p, width = packed_seq_params, value.shape[-1]
        if not self.config.multi_latent_attention:
            query, key = rotate(query, p.cos, p.sin), rotate(key, p.cos, p.sin)
        elif width < key.shape[-1]:  # kernels require one width
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        bounds = dict(cu_seqlens=p.cu_seqlens_kv, max_seqlen=p.max_seqlen_kv, scale=self.scale)
        if p.shared is None:
            return packed_attention(query, key, value, **bounds)[..., :width].flatten(1)
        group = parallel_state.get_context_parallel_group()
        out = shared_attention(query, key, value, **bounds, shared=p.shared, group=group)
        return out[..., :width].flatten(1)


def block_spec(
    config: TransformerConfig, vp_stage: int | None, expert_layers: Sequence[int]
) -> TransformerBlockSubmodules:
    """Return Megatron's local layers of a chunk of this stage, with the norms and the core attention of this file."""
    first, count = (f(config, vp_stage=vp_stage) for f in (get_transformer_layer_offset, get_num_layers_to_build))
    delta = config.linear_attention_freq or [0] * config.num_layers
    layers = [_layer_spec(config, i in expert_layers, bool(delta[i])) for i in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


# Megatron's modules that do not pack sequences, split norms or log routes: instep's modules replace them.
_PLAIN = [DotProductAttention, MLASelfAttention, LNImpl, WrappedTorchNorm, TopKRouter, SequentialMLP, GroupedMLP]
_PLAIN.append(SharedExpertMLP)


def users_block(own: TransformerBlockSubmodules, theirs: Any) -> TransformerBlockSubmodules:
    """Return the layers of the user's spec, in which modules of `own` replace Megatron's plain ones.

    Args:
        theirs: a spec of every layer, or one spec for all.

    Raises:
        TypeError, ValueError: it is not a spec, or has another number of layers.
    """
    if isinstance(theirs, ModuleSpec):
        theirs = TransformerBlockSubmodules([theirs] * len(own.layer_specs), own.layer_norm)
    if not isinstance(theirs, TransformerBlockSubmodules) or not all(
        isinstance(layer, ModuleSpec) for layer in theirs.layer_specs or ()
    ):
        raise TypeError("no spec")
    for layer, mine in zip(theirs.layer_specs, own.layer_specs, strict=True):
        _adopt(layer.submodules, mine.submodules)
    if theirs.layer_norm in _PLAIN:
        theirs.layer_norm = own.layer_norm
    return theirs


def _adopt(theirs: Any, mine: Any) -> None:
    """Replace plain parts of `theirs` by those of the layer `mine`, and its keys of checkpoints."""
    for name, part in vars(mine).items() if type(theirs) is type(mine) else ():
        found = getattr(theirs, name)
        module, own = (p.module if isinstance(p, ModuleSpec) else p for p in (found, part))
        replaced = module in _PLAIN and module is not own and part is not IdentityOp
        if name == "sharded_state_dict_keys_map" or replaced:
            setattr(theirs, name, part)
        elif isinstance(found, ModuleSpec) and isinstance(part, ModuleSpec):
            _adopt(found.submodules, part.submodules)


def _layer_spec(config: TransformerConfig, has_experts: bool, delta: bool) -> ModuleSpec:
    num_experts = config.num_moe_experts if has_experts else None
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        layer.submodules.self_attention = latent_attention(PackedCoreAttention, RMSNorm)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if delta:
        layer.submodules.self_attention = ModuleSpec(GatedDeltaNet)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadRMSNorm
    if has_experts:
        layer.submodules.mlp.submodules.router = Router
        layer.submodules.mlp.submodules.shared_experts.module = SharedExperts
        if config.moe_grouped_gemm:
            layer.submodules.mlp.submodules.experts.module = GroupedExperts
    # Checkpoints have Transformer Engine's names, which join a norm with the linear layer after it.
    qkv, mlp, *latent = FUSED
    attention_norms = [] if delta else latent if config.multi_latent_attention else [qkv]
    layer.submodules.sharded_state_dict_keys_map = dict([*attention_norms, *([] if has_experts else [mlp])])
    return layer


def _with_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return embeddings with a gradient, even if the embedding is frozen: recomputed layers (re-entrant checkpoints)
    need an input with one."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


class PolicyModel(GPTModel):
    """A GPTModel that returns the fields of `TokenOutputs` for response tokens instead of logits of all tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        padded_vocab: int,
        vocab_size: int,
        value_head: bool,
        vp_stage: int | None,
        block: TransformerBlockSubmodules,
        num_mtp_layers: int = 0,
        **kwargs: Any,
    ):
        super().__init__(
            config, block, vocab_size=padded_vocab, position_embedding_type="none", vp_stage=vp_stage, **kwargs
        )  # the core attention rotates
        self.real_vocab_size, self.value_head = vocab_size, value_head
        if self.post_process and num_mtp_layers:
            layer = _layer_spec(config, config.num_moe_experts is not None, delta=False)
            self.mtp = MultiTokenPrediction(
                config, num_mtp_layers, layer, RMSNorm, self.pg_collection, vp_stage, vocab=(vocab_size, padded_vocab),
                num_logits=HEAD_LOGITS * config.tensor_model_parallel_size, embeds=self.pre_process,
            )  # fmt: skip
        for layer in self.decoder.layers:
            if layer.is_moe_layer:
                layer.register_forward_pre_hook(before_layer, with_kwargs=True)
        for module in self.modules():
            if isinstance(module, MoELayer):
                _stay_on_one_rank(module, self.pg_collection)
            if isinstance(module, GroupedExperts):
                module.lay_out()
        if self.pre_process and config.recompute_granularity is not None:
            self.embedding.register_forward_hook(_with_gradient)
        if self.post_process and value_head:
            # Every tensor-parallel rank has the head and all of its input, so there is nothing to reduce.
            device, dtype = torch.cuda.current_device(), config.params_dtype
            self.output_layer = torch.nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=dtype)
        elif self.post_process:
            # The head reads few positions: they are gathered first, and its input gradient is all-reduced.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    @property
    def drafter(self) -> MultiTokenPrediction | None:
        """The layers of multi-token prediction. Not named `mtp`: Megatron takes that attribute for a module."""
        return cast("MultiTokenPrediction | None", self._modules.get("mtp"))

    def forward(self, *args: Any, packed_seq_params: PackedInput, **kwargs: Any) -> Any:
        """Run the model. Routers get the mask of padding tokens; Megatron cuts it for sequence parallelism only where
        it embeds."""
        mask = self._padding(packed_seq_params, cut=not self.pre_process)
        return super().forward(*args, packed_seq_params=packed_seq_params, padding_mask=mask, **kwargs)

    def _padding(self, packed: PackedInput, *, cut: bool) -> Tensor | None:
        mask, config = packed.padding, self.config
        if mask is None or config.num_moe_experts is None or not torch.is_grad_enabled():
            return None
        parts = config.tensor_model_parallel_size if config.sequence_parallel and cut else 1
        return mask.chunk(parts, dim=1)[self.pg_collection.tp.rank() % parts]

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedInput, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        p, config = packed_seq_params, self.config
        drafts = None
        if (mtp := self.drafter) is not None and mtp.trains and torch.is_grad_enabled():
            weight = (
                self.shared_embedding_or_output_weight()
                if self.share_embeddings_and_output_weights
                else self.output_layer.weight
            )
            drafts = mtp.log_probs(hidden_states, p, self._padding(p, cut=True), self._embed, weight.detach())
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        if p.with_logits:  # without tensor parallelism
            logits = self._logits(hidden_states)[:, : self.real_vocab_size].float()
            scores, size = rows(logits, p.positions), self.real_vocab_size
            outputs = log_probs_and_entropy(
                scores, p.targets, p.temperature, vocab_size=size, with_entropy=p.with_entropy
            )
            return *outputs, logits[None], None, drafts
        hidden = rows(hidden_states, p.positions)
        if self.value_head:
            return hidden.new_empty(0), None, None, _whole(values(hidden[:, 0], self.output_layer.weight), p)
        log_probs, entropy = in_chunks(
            self._head, hidden, p.targets, p.temperature, p.with_entropy,
            num_logits=HEAD_LOGITS * config.tensor_model_parallel_size, vocab_size=self.vocab_size,
        )  # fmt: skip
        return _whole(log_probs, p), None if entropy is None else _whole(entropy, p), None, None, drafts

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings `[num_tokens, 1, hidden]`, also on the last stage of a pipeline."""
        if not self.pre_process:
            return self.mtp.embed(tokens)  # type: ignore[no-any-return]
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=None)
        return embedded

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        group = self.pg_collection.tp if self.config.tensor_model_parallel_size > 1 else None
        return log_probs_and_entropy(
            self._logits(hidden), targets, temperature, vocab_size=self.real_vocab_size, tp_group=group,
            with_entropy=with_entropy,
        )  # fmt: skip

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits `[num_tokens, V_local]` of `[num_tokens, 1, hidden]`."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0][:, 0]


def _stay_on_one_rank(layer: torch.nn.Module, groups: Any) -> None:
    """Give a layer with all experts on this rank, and grouped, the dispatcher for that."""
    theirs, config = layer.token_dispatcher, layer.config
    plain = config.moe_expert_capacity_factor is None and not config.moe_shared_expert_overlap
    alone = type(theirs) is MoEAlltoAllTokenDispatcher and theirs.ep_size * theirs.tp_size == 1
    if plain and alone and isinstance(layer.experts, GroupedExperts):
        layer.token_dispatcher = OnOneRank(
            layer.num_local_experts, layer.local_expert_indices, config, pg_collection=groups
        )


def _whole(column: Tensor, p: PackedInput) -> Tensor:
    """Return the column of all response tokens of the micro-batch; each context-parallel rank computes some of them."""
    if p.own is None:
        return column
    return whole(column, p.own, p.num_response_tokens, parallel_state.get_context_parallel_group())

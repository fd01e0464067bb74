"""Megatron-Core's configuration objects, from instep's arguments and the Hugging Face configuration.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from instep.arguments.settings import ParallelSettings, Settings
from instep.errors import ConfigError
from instep.models.shape import DeltaNet, Experts, LatentAttention, ModelShape
from instep.models.stages import num_chunks
from instep.training.megatron.layout import expert_tensor_parallel_size


def configs(
    args: Settings, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> tuple[TransformerConfig, DistributedDataParallelConfig, OptimizerConfig]:
    """Return the configurations of model, data parallelism and optimizer. `args.megatron_overrides` replaces their
    fields, and so does a flag of `train.py` or of a modified Megatron with a field's name.

    Raises:
        ConfigError: an override is not a field, or megatron-core refuses the values.
    """
    bf16 = dtype is torch.bfloat16
    kind, model = TransformerConfig, _model(args, shape, device, dtype)
    if shape.experts:
        model |= _mixture(args, shape.experts, shape.num_layers)
    if shape.delta:
        model |= _delta_net(shape.delta, shape.num_layers)
    if shape.latent:
        kind, model = MLATransformerConfig, model | _latent(shape, shape.latent)
    ddp = dict(grad_reduce_in_fp32=bf16, use_distributed_optimizer=bool(args.use_distributed_optimizer))
    optimizer = dict(
        optimizer="adam",
        lr=args.lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=bool(args.use_distributed_optimizer),
    )
    _override(args, ((kind, model), (DistributedDataParallelConfig, ddp), (OptimizerConfig, optimizer)))
    try:
        return kind(**model), DistributedDataParallelConfig(**ddp), OptimizerConfig(**optimizer)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"megatron-core refuses this configuration: {error}",
            where="the Megatron arguments",
            remedy="change the flags that the message names",
        ) from error


def _model(args: Settings, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a `TransformerConfig`, without those of a mixture of experts."""
    cuda, pipeline = device.type == "cuda", args.pipeline_model_parallel_size > 1
    chunks = num_chunks(args, shape.num_layers)
    return dict(
        **shape.sizes,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        overlap_p2p_comm=chunks > 1,  # otherwise two stages confuse each other's tensors of the two directions
        batch_p2p_comm=chunks == 1,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=bool(args.sequence_parallel),
        use_cpu_initialization=not cuda,
        bias_activation_fusion=cuda,  # by torch.compile: 3 to 6 % faster, 8 GiB less for 24k tokens of a 0.6B model
        bias_dropout_fusion=cuda,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        calculate_per_token_loss=True,  # gradients are sums, not means over micro-batches and ranks
        variable_seq_lengths=pipeline,  # micro-batches differ in size
        moe_token_dispatcher_type="alltoall" if pipeline or shape.experts else "allgather",  # they require it
        deterministic_mode=args.deterministic_mode,
        deallocate_pipeline_outputs=cuda and pipeline,  # gloo's sends may still read these outputs
    )


def _mixture(args: ParallelSettings, experts: Experts, num_layers: int) -> dict[str, Any]:
    model: dict[str, Any] = dict(
        num_moe_experts=experts.num,
        moe_router_topk=experts.num_active,
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_layer_freq=[int(i in experts.layers) for i in range(num_layers)],
        moe_router_pre_softmax=not experts.normalized,
        moe_router_dtype=args.moe_router_dtype,
        moe_grouped_gemm=args.moe_grouped_gemm,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_z_loss_coeff=args.moe_z_loss_coeff,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(args),
    )
    if experts.sigmoid:
        model |= dict(
            moe_router_score_function="sigmoid",
            moe_router_dtype=args.moe_router_dtype or "fp32",  # as in transformers and vLLM
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=args.moe_router_bias_update_rate,
            moe_router_topk_scaling_factor=experts.scale,
        )
    if experts.num_groups > 1:
        model |= dict(moe_router_num_groups=experts.num_groups, moe_router_group_topk=experts.num_active_groups)
    if experts.shared_ffn_hidden_size:
        model |= dict(moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size)
        model |= dict(moe_shared_expert_gate=experts.shared_gate)
    return model


def _override(args: Settings, parts: Sequence[tuple[type, dict[str, Any]]]) -> None:
    """Set `megatron_overrides`, and flags that are not instep's own, in the fields of the classes that have them."""
    fields = {cls: {f.name for f in dataclasses.fields(cls)} for cls, _ in parts}
    known = set().union(*fields.values())
    extra = {name: getattr(args, name) for name in args.extra_flags if name in known}
    for name, value in {**extra, **(args.megatron_overrides or {})}.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"megatron-core has no setting {name!r}",
                where="megatron_overrides",
                remedy=f"did you mean {near[0]!r}?" if near else "see megatron-core's TransformerConfig",
            )
        for cls, values in parts:
            if name in fields[cls]:
                values[name] = value


def _delta_net(delta: DeltaNet, num_layers: int) -> dict[str, Any]:
    return dict(
        linear_attention_freq=[int(i in delta.layers) for i in range(num_layers)],
        linear_num_key_heads=delta.key_heads,
        linear_num_value_heads=delta.value_heads,
        linear_key_head_dim=delta.key_dim,
        linear_value_head_dim=delta.value_dim,
        linear_conv_kernel_dim=delta.conv_width,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
    )


def _latent(shape: ModelShape, attention: LatentAttention) -> dict[str, Any]:
    """Return the fields of latent attention. `rotary.py` replaces Megatron's rotary embedding; only YaRN's scale of
    scores is used."""
    scaled = shape.rope["rope_type"] != "default"
    return dict(
        q_lora_rank=attention.q_rank,
        kv_lora_rank=attention.kv_rank,
        qk_head_dim=attention.content_dim,
        qk_pos_emb_head_dim=attention.rotary_dim,
        v_head_dim=attention.value_dim,
        rope_type="rope",
        rotary_scaling_factor=shape.rope["factor"] if scaled else 1.0,
        mscale_all_dim=shape.rope.get("mscale_all_dim") or 0.0,
    )

"""The models and the layouts of ranks in which `megatron_runs.py` trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

CUDA = torch.cuda.is_available()

# eps is large, because Adam blows rounding noise of vanishing gradients up to full steps
HEAD_LOGITS = 2**28  # the default
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 3e-3, 0.1, (0.9, 0.95), 1e-4, 1.0
NUMBERS = dict(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip
EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=0.8, mscale_all_dim=1.2, beta_fast=32, beta_slow=1,
            original_max_position_embeddings=32)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False,
)  # fmt: skip
DELTA = dict(
    num_hidden_layers=4, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"] * 2,
    rms_norm_eps=1e-3,  # a first token's result may be small: its norm would blow rounding up
)  # fmt: skip
HYBRID = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48)
MODELS: dict[str, PretrainedConfig] = {
    "untied": Qwen3Config(**NUMBERS, head_dim=16, tie_word_embeddings=False),
    "tied": Qwen3Config(**NUMBERS, head_dim=16, tie_word_embeddings=True),
    "deep": Qwen3Config(**NUMBERS | dict(num_hidden_layers=4), head_dim=16, tie_word_embeddings=True),
    "deeper": Qwen3Config(**NUMBERS | dict(num_hidden_layers=8), head_dim=16, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**NUMBERS, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "moe-mixed": Qwen3MoeConfig(
        **NUMBERS | dict(num_hidden_layers=4),
        **EXPERTS,
        norm_topk_prob=False,
        mlp_only_layers=[0, 1],
        tie_word_embeddings=False,
    ),
    "deepseek": DeepseekV3Config(
        **NUMBERS | LATENT,
        q_lora_rank=16,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_parameters=YARN,
    ),
    "deepseek-plain": DeepseekV3Config(
        **NUMBERS | LATENT,
        q_lora_rank=None,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        routed_scaling_factor=1.5,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "qwen3.5": Qwen3_5TextConfig(**NUMBERS | DELTA, tie_word_embeddings=True),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **{name: n for name, n in NUMBERS.items() if name != "intermediate_size"} | DELTA | HYBRID,
        tie_word_embeddings=False,
    ),
    "qwen3-next": Qwen3NextConfig(**NUMBERS | DELTA | HYBRID, mlp_only_layers=[1], tie_word_embeddings=False),
    "qwen2": Qwen2Config(**NUMBERS, tie_word_embeddings=True),
    "llama": LlamaConfig(**NUMBERS, head_dim=16, tie_word_embeddings=False, rope_parameters=LLAMA3),
}
# The same ones, with a layer of multi-token prediction in their checkpoints.
MODELS |= {f"{name}-mtp": MODELS[name] for name in ("deepseek", "qwen3.5", "qwen3.5-moe", "qwen3-next")}
MTP_SCALE = 5.0  # so that the clip acts on these layers, too
MTP: dict[str, Any] = dict(mtp_num_layers=1, enable_mtp_training=True, mtp_loss_scaling_factor=MTP_SCALE)
BIAS_RATES = {"deepseek": 0.02, "deepseek-mtp": 0.02}  # of the experts, in an optimizer step
ROUTER = dict(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.02)
# name: (ranks, model, arguments); each with `SLOW` or four ranks runs in `make test-full` alone
LAYOUTS = {
    "one": (1, "untied", {}),
    "one-no-clip": (1, "untied", dict(clip_grad=0.0)),
    "one-tied": (1, "tied", {}),
    "one-deep": (1, "deep", {}),
    "one-qwen2": (1, "qwen2", {}),
    "one-llama": (1, "llama", {}),
    "one-recompute": (
        1, "untied", dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
    "one-chunked": (1, "untied", dict(head_logits=300)),
    "one-moe": (1, "moe", {}),
    "one-moe-mixed": (1, "moe-mixed", {}),
    "one-moe-losses": (1, "moe", ROUTER),
    "one-moe-grouped": (1, "moe-mixed", dict(moe_grouped_gemm=True)),
    "one-moe-grouped-act": (1, "moe-mixed", dict(
        moe_grouped_gemm=True, recompute_granularity="selective", megatron_overrides={"recompute_modules": ["moe_act"]},
    )),
    "tp2-sp-ep2-grouped": (2, "deepseek", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1, moe_grouped_gemm=True,
    )),
    "tp2-sp-etp2-grouped": (2, "moe", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, moe_grouped_gemm=True,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
    )),
    "cp2-ep2-losses": (2, "moe", dict(context_parallel_size=2, expert_model_parallel_size=2, **ROUTER)),
    "tp2-sp-pp2-losses": (4, "moe", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, **ROUTER,
    )),
    "ep2": (2, "moe", dict(expert_model_parallel_size=2)),
    "ep2-dist-opt": (2, "moe-mixed", dict(expert_model_parallel_size=2, use_distributed_optimizer=True)),
    "tp2-sp-etp2": (2, "moe", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2-sp-ep2": (2, "moe-mixed", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )),
    "cp2-ep2": (2, "moe", dict(context_parallel_size=2, expert_model_parallel_size=2)),
    "pp2-moe": (2, "moe-mixed", dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
    "ep2-etp2": (4, "moe", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=2, use_distributed_optimizer=True,
    )),
    "pp2-ep2": (4, "moe-mixed", dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2)),
    "tp2-sp-cp2-ep4": (4, "moe", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )),
    "one-deepseek": (1, "deepseek", {}),
    "one-deepseek-plain": (1, "deepseek-plain", dict(recompute_granularity="selective")),
    "one-deepseek-losses": (1, "deepseek-plain", ROUTER),
    "one-deepseek-grouped": (1, "deepseek", dict(moe_grouped_gemm=True)),
    "tp2-sp-deepseek": (2, "deepseek", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2-sp-ep2-deepseek": (2, "deepseek-plain", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )),
    "ep2-deepseek": (2, "deepseek", dict(
        expert_model_parallel_size=2, use_distributed_optimizer=True, recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1,
    )),
    "pp2-deepseek": (2, "deepseek", dict(pipeline_model_parallel_size=2)),
    "cp2-deepseek": (2, "deepseek", dict(context_parallel_size=2)),
    "tp2-sp-pp2-deepseek": (4, "deepseek", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
        expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )),
    "one-qwen3.5": (1, "qwen3.5", {}),
    "one-qwen3.5-moe": (1, "qwen3.5-moe", {}),
    "one-qwen3-next": (1, "qwen3-next", dict(moe_grouped_gemm=True)),
    "tp2-qwen3.5": (2, "qwen3.5", dict(tensor_model_parallel_size=2)),
    "tp2-sp-qwen3.5": (2, "qwen3.5", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True,
    )),
    "ep2-qwen3.5-moe": (2, "qwen3.5-moe", dict(
        expert_model_parallel_size=2, use_distributed_optimizer=True, recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1,
    )),
    "tp2-sp-ep2-qwen3-next": (2, "qwen3-next", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )),
    "pp2-qwen3.5": (2, "qwen3.5", dict(pipeline_model_parallel_size=2, recompute_granularity="selective")),
    "pp2-virtual-qwen3-next": (2, "qwen3-next", dict(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2,
    )),
    "cp2-qwen3.5": (2, "qwen3.5", dict(context_parallel_size=2)),
    "cp2-ep2-qwen3-next": (2, "qwen3-next", dict(
        context_parallel_size=2, expert_model_parallel_size=2, recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1,
    )),
    "tp2-sp-pp2-qwen3.5-moe": (4, "qwen3.5-moe", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
    )),
    "tp2-sp-cp2-qwen3.5": (4, "qwen3.5", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, use_distributed_optimizer=True,
    )),
    "one-deepseek-mtp": (1, "deepseek-mtp", MTP),
    "one-qwen3.5-mtp": (1, "qwen3.5-mtp", MTP | dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
    )),
    "one-qwen3-next-mtp": (1, "qwen3-next-mtp", MTP | dict(moe_grouped_gemm=True)),
    "one-kept-mtp": (1, "qwen3.5-moe-mtp", dict(mtp_num_layers=1)),
    "tp2-qwen3.5-mtp": (2, "qwen3.5-mtp", MTP | dict(tensor_model_parallel_size=2)),
    "dp2-deepseek-mtp": (2, "deepseek-mtp", MTP | dict(
        use_distributed_optimizer=True, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1,
    )),
    "tp2-sp-ep2-deepseek-mtp": (2, "deepseek-mtp", MTP | dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )),
    "ep2-qwen3.5-moe-mtp": (2, "qwen3.5-moe-mtp", MTP | dict(
        expert_model_parallel_size=2, use_distributed_optimizer=True,
    )),
    "pp2-qwen3.5-mtp": (2, "qwen3.5-mtp", MTP | dict(pipeline_model_parallel_size=2)),
    "pp2-virtual-qwen3-next-mtp": (2, "qwen3-next-mtp", MTP | dict(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2,
    )),
    "tp2-sp-pp2-deepseek-mtp": (4, "deepseek-mtp", MTP | dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
        use_distributed_optimizer=True,
    )),
    "tp2": (2, "untied", dict(tensor_model_parallel_size=2)),
    "tp2-chunked": (2, "tied", dict(tensor_model_parallel_size=2, head_logits=200)),
    "tp2-tied": (2, "tied", dict(tensor_model_parallel_size=2)),
    "tp2-qwen2": (2, "qwen2", dict(tensor_model_parallel_size=2)),
    "pp2-qwen2": (2, "qwen2", dict(pipeline_model_parallel_size=2)),
    "tp2-llama": (2, "llama", dict(tensor_model_parallel_size=2)),
    "pp2-llama": (2, "llama", dict(pipeline_model_parallel_size=2)),
    "tp2-sp": (2, "untied", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2-sp-tied": (2, "tied", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "dp2": (2, "untied", {}),
    "dp2-dist-opt": (2, "untied", dict(use_distributed_optimizer=True)),
    "dp2-dist-opt-overlap": (2, "untied", dict(
        use_distributed_optimizer=True, megatron_overrides={"overlap_grad_reduce": True, "check_for_large_grads": True},
    )),
    "ep2-overlap": (2, "moe", dict(
        expert_model_parallel_size=2, megatron_overrides={"overlap_grad_reduce": True},
    )),
    "pp2-virtual-overlap": (2, "deep", dict(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2,
        megatron_overrides={"overlap_grad_reduce": True},
    )),
    "tp2-recompute-distributed": (2, "untied", dict(
        tensor_model_parallel_size=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
        megatron_overrides={"distribute_saved_activations": True},
    )),
    "pp2": (2, "untied", dict(pipeline_model_parallel_size=2)),
    "pp2-deep": (2, "deep", dict(pipeline_model_parallel_size=2)),
    "pp2-uneven": (2, "deep", dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1)),
    "pp2-uneven-virtual": (2, "deeper", dict(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, decoder_last_pipeline_num_layers=2,
    )),
    "pp2-virtual": (2, "deep", dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
    "cp2": (2, "untied", dict(context_parallel_size=2)),
    "cp2-dist-opt": (2, "tied", dict(context_parallel_size=2, use_distributed_optimizer=True)),
    "pp2-tied": (2, "tied", dict(pipeline_model_parallel_size=2)),
    "tp2-sp-cp2": (4, "untied", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, use_distributed_optimizer=True,
        head_logits=300,
    )),
    "pp2-cp2": (4, "tied", dict(pipeline_model_parallel_size=2, context_parallel_size=2)),
    "dp2-cp2-dist-opt": (4, "untied", dict(context_parallel_size=2, use_distributed_optimizer=True)),
    "cp4": (4, "untied", dict(context_parallel_size=4)),
    "tp2-sp-pp2-virtual": (4, "deep", dict(
        tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=1,
    )),
    "pp4-virtual-dist-opt": (4, "deeper", dict(
        pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2, use_distributed_optimizer=True,
    )),
}  # fmt: skip
SLOW = {
    "one-moe-grouped", "one-moe-grouped-act", "one-deepseek-grouped", "tp2-sp-ep2-grouped", "tp2-sp-etp2-grouped",
    "cp2", "cp2-dist-opt", "one-deep", "pp2-deep", "one-moe", "one-moe-mixed", "one-moe-losses", "ep2", "ep2-dist-opt",
    "tp2-sp-etp2", "tp2-sp-ep2", "cp2-ep2", "pp2-moe", "one-deepseek-plain", "one-deepseek-losses",
    "tp2-sp-ep2-deepseek", "ep2-deepseek", "pp2-deepseek", "cp2-deepseek", "pp2-uneven", "pp2-uneven-virtual",
    "pp2-qwen2", "tp2-llama", "pp2-llama", "ep2-overlap", "pp2-virtual-overlap", "tp2-recompute-distributed",
    "tp2-tied", "tp2-qwen2", "tp2-chunked", "dp2-dist-opt-overlap", "tp2", "tp2-sp-tied", "pp2", "dp2",
    "one-qwen3.5-moe", "one-qwen3-next", "tp2-qwen3.5", "tp2-sp-qwen3.5", "ep2-qwen3.5-moe", "pp2-qwen3.5",
    "pp2-virtual-qwen3-next", "cp2-ep2-qwen3-next", "one-qwen3-next-mtp", "tp2-qwen3.5-mtp", "dp2-deepseek-mtp",
    "ep2-qwen3.5-moe-mtp", "pp2-qwen3.5-mtp", "pp2-virtual-qwen3-next-mtp",
}  # fmt: skip
# saved by -> loaded by
RESUMES = [
    ("tp2", "one"), ("tp2-sp", "one"), ("dp2-dist-opt", "one"), ("dp2-dist-opt", "pp2"), ("pp2", "dp2-dist-opt"),
    ("dp2-dist-opt", "tp2-sp"), ("dp2", "dp2"), ("dp2-dist-opt", "dp2-dist-opt"), ("pp2-tied", "one-tied"),
    ("pp2-virtual", "one-deep"), ("cp2-dist-opt", "one-tied"), ("tp2-sp-cp2", "dp2-cp2-dist-opt"),
    ("tp2-sp-pp2-virtual", "pp2-deep"), ("ep2-etp2", "ep2"), ("ep2-dist-opt", "tp2-sp-ep2"),
    ("pp2-ep2", "one-moe-mixed"), ("tp2-sp-deepseek", "one-deepseek"), ("tp2-sp-pp2-deepseek", "ep2-deepseek"),
    ("pp2-uneven", "pp2-deep"), ("tp2-sp-qwen3.5", "one-qwen3.5"), ("pp2-virtual-qwen3-next", "tp2-sp-ep2-qwen3-next"),
    ("tp2-sp-pp2-qwen3.5-moe", "ep2-qwen3.5-moe"), ("tp2-sp-ep2-deepseek-mtp", "one-deepseek-mtp"),
    ("tp2-sp-pp2-deepseek-mtp", "dp2-deepseek-mtp"), ("dp2-deepseek-mtp", "tp2-sp-ep2-deepseek-mtp"),
    ("pp2-virtual-qwen3-next-mtp", "one-qwen3-next-mtp"),
]  # fmt: skip


def make_models(root: Path) -> None:
    """Random weights of every model of `MODELS` in a folder of its name."""
    from tests.distributed.mtp_oracle import Drafter  # which imports this file

    for name, config in MODELS.items():
        model = random_model(config)
        model.save_pretrained(root / name, max_shard_size="100KB" if name == "untied" else "1GB")
        if name.endswith("-mtp"):
            file = root / name / "model.safetensors"
            save_file(load_file(file) | Drafter(model).weights(), file, {"format": "pt"})
    file = (
        root / "deepseek" / "model.safetensors"
    )  # which gets a layer of multi-token prediction, as published ones have
    behind = {f"model.layers.2.{part}.weight": torch.randn(64) for part in ("enorm", "hnorm")}
    save_file(load_file(file) | behind, file, {"format": "pt"})


def random_model(config: PretrainedConfig, seed: int = 7) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (p if p.ndim == 1 else 0))  # norms stay near the identity
        for b in model.buffers():
            if b.numel() == config.to_dict().get("n_routed_experts"):  # the biases of the experts
                b.copy_(torch.randn_like(b) * 0.1)
    return model

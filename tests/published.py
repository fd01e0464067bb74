"""config.json of published models: the shapes of scripts/models/*.sh."""

COMMON = {"hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 40960}
QWEN2 = COMMON | {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 = COMMON | {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128, "vocab_size": 151936}
EXPERTS = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
LLAMA = COMMON | {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5, "vocab_size": 128256}
LATENT = COMMON | {
    "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
DEEPSEEK = LATENT | {
    "q_lora_rank": 1536, "vocab_size": 129280, "rms_norm_eps": 1e-6, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
MOONLIGHT = LATENT | {
    "q_lora_rank": None, "vocab_size": 163840, "rms_norm_eps": 1e-5, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446, "rope_theta": 50000,
}  # fmt: skip
HYBRID = COMMON | {
    "rms_norm_eps": 1e-6, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
}  # fmt: skip
NEXT = HYBRID | {
    "model_type": "qwen3_next", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "vocab_size": 151936,
    "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
QWEN35 = HYBRID | {
    "model_type": "qwen3_5_text", "vocab_size": 248320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN35_27B = QWEN35 | {"linear_num_value_heads": 48}
QWEN35_EXPERTS = QWEN35 | {
    "model_type": "qwen3_5_moe_text", "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN35_397B = QWEN35_EXPERTS | {
    "linear_num_value_heads": 64, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}  # fmt: skip
ARCHITECTURES = {
    "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "deepseek_v3": "DeepseekV3",
    "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe",
}  # fmt: skip
NAMES = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size tie_word_embeddings"
# As published: layers, width, heads, key heads, width of the MLP (None: all layers have experts), tied; the rest of
# config.json; parameters in 10^9.
PUBLISHED = {
    "qwen2.5-0.5B": (24, 896, 14, 2, 4864, True, QWEN2 | {"vocab_size": 151936}, 0.494),
    "qwen2.5-1.5B": (28, 1536, 12, 2, 8960, True, QWEN2 | {"vocab_size": 151936}, 1.544),
    "qwen2.5-3B": (36, 2048, 16, 2, 11008, True, QWEN2 | {"vocab_size": 151936}, 3.086),
    "qwen2.5-7B": (28, 3584, 28, 4, 18944, False, QWEN2 | {"vocab_size": 152064}, 7.616),
    "qwen2.5-14B": (48, 5120, 40, 8, 13824, False, QWEN2 | {"vocab_size": 152064}, 14.77),
    "qwen2.5-32B": (64, 5120, 40, 8, 27648, False, QWEN2 | {"vocab_size": 152064}, 32.76),
    "qwen2.5-72B": (80, 8192, 64, 8, 29568, False, QWEN2 | {"vocab_size": 152064}, 72.71),
    "qwen3-0.6B": (28, 1024, 16, 8, 3072, True, QWEN3, 0.596),
    "qwen3-1.7B": (28, 2048, 16, 8, 6144, True, QWEN3, 1.721),
    "qwen3-4B": (36, 2560, 32, 8, 9728, True, QWEN3, 4.022),
    "qwen3-8B": (36, 4096, 32, 8, 12288, False, QWEN3, 8.191),
    "qwen3-14B": (40, 5120, 40, 8, 17408, False, QWEN3, 14.77),
    "qwen3-32B": (64, 5120, 64, 8, 25600, False, QWEN3, 32.76),
    "qwen3-30B-A3B": (48, 2048, 32, 4, 6144, False, EXPERTS | {"moe_intermediate_size": 768}, 30.53),
    "qwen3-235B-A22B": (94, 4096, 64, 4, 12288, False, EXPERTS | {"moe_intermediate_size": 1536}, 235.1),
    "llama3.1-8B": (32, 4096, 32, 8, 14336, False, LLAMA, 8.03),
    "llama3.2-1B": (16, 2048, 32, 8, 8192, True, LLAMA, 1.236),
    "llama3.2-3B": (28, 3072, 24, 8, 8192, True, LLAMA, 3.213),
    "llama3.3-70B": (80, 8192, 64, 8, 28672, False, LLAMA, 70.55),
    "deepseek-v3": (61, 7168, 128, 128, 18432, False, DEEPSEEK, 671.0),
    "qwen3-next-80B-A3B": (48, 2048, 16, 2, 5120, False, NEXT, 79.67),
    "qwen3.5-0.8B": (24, 1024, 8, 2, 3584, True, QWEN35 | {"linear_num_value_heads": 16}, 0.752),
    "qwen3.5-27B": (64, 5120, 24, 4, 17408, False, QWEN35_27B, 26.9),
    "qwen3.5-35B-A3B": (40, 2048, 16, 2, None, False, QWEN35_EXPERTS, 34.66),
    "qwen3.5-397B-A17B": (60, 4096, 32, 2, None, False, QWEN35_397B, 396.3),
    "qwen3.6-27B": (64, 5120, 24, 4, 17408, False, QWEN35_27B, 26.9),
    "qwen3.6-35B-A3B": (40, 2048, 16, 2, None, False, QWEN35_EXPERTS, 34.66),
    "moonlight-16B-A3B": (27, 2048, 16, 16, 11264, False, MOONLIGHT, 15.96),
}


def config(name: str) -> dict[str, object]:
    *numbers, rest, _ = PUBLISHED[name]
    kind = ARCHITECTURES[rest["model_type"]]
    sizes = {n: size for n, size in zip(NAMES.split(), numbers, strict=True) if size is not None}
    return {"architectures": [f"{kind}ForCausalLM"], **sizes, **rest}

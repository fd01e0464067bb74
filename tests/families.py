"""A tiny model of each family that docs/models.md shows with vLLM, in shapes that vLLM serves on CPUs and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.assets import make_tokenizer


@dataclass(frozen=True)
class Family:
    """Its `model_type` in transformers, its own settings, if it is trained packed, and what vLLM has on a CPU."""

    model_type: str
    settings: dict[str, Any]
    packed: bool = True
    precision: str = "fp32"


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # vLLM has no others on Hopper
_DELTA = {  # the linear attention of Qwen3-Next and Qwen3.5
    "num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip

FAMILIES = {
    "qwen2": Family("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": Family("qwen3", _HEADS),
    "qwen3_moe": Family("qwen3_moe", {**_HEADS, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "llama": Family("llama", _HEADS),
    "yi": Family("llama", {**_HEADS, "num_key_value_heads": 1, "rope_theta": 5e6}),
    "mistral": Family("mistral", {**_HEADS, "sliding_window": 16}),
    "mixtral": Family("mixtral", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi": Family(
        "phi",
        {
            "num_attention_heads": 2, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
            "intermediate_size": 256,  # four times the hidden size, as published: vLLM 0.26 reads nothing else
        },
    ),
    "phi3": Family("phi3", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "gemma": Family("gemma", {**_HEADS, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": Family("gemma2", {**_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 32}, packed=False),
    "gemma3": Family(
        "gemma3_text",
        {
            **_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            **_EXPERTS, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512,
            **_LATENT_HEADS, "n_routed_experts": 4,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
        precision="bf16",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **_EXPERTS, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 48, "kv_lora_rank": 512,
            **_LATENT_HEADS, "n_routed_experts": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc",  # as the published ones say, for vLLM
        },
        precision="bf16",
    ),
    "starcoder2": Family("starcoder2", {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 16}),
    "qwen3_next": Family(
        "qwen3_next",
        {**_HEADS, **_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 32},
        precision="bf16",
    ),
    "qwen3_5": Family("qwen3_5_text", {**_HEADS, **_DELTA}, precision="bf16"),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        {**_HEADS, **_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 32},
        precision="bf16",
    ),
}  # fmt: skip


def make_family(name: str, folder: Path, precision: str | None = None, **sizes: Any) -> Path:
    """A random checkpoint of the family in `folder`, with a tokenizer of single characters; for `precision`, by default
    the family's own; with `sizes` instead of its own."""
    noise = (
        0.12 if (precision or FAMILIES[name].precision) == "fp32" else 0.04
    )  # so that bfloat16 rounds log-probs less
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(family_config(name, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(noise * torch.randn_like(weight) + (weight if weight.ndim == 1 else 0))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def family_config(name: str, **sizes: Any) -> Any:
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    settings = {**_SMALL, **FAMILIES[name].settings, **sizes, **ids, "vocab_size": 64}
    return CONFIG_MAPPING[FAMILIES[name].model_type](**settings)


def make_published(text: Any, folder: Path, *, stacked: bool = False) -> Path:
    """A random checkpoint with layers for images, as Qwen3.5 is published, with a language model of the config `text`.

    Args:
        stacked: the experts of a layer are in two tensors, as in the published mixtures; otherwise one by one.
    """
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": text.hidden_size,
    }
    kind = CONFIG_MAPPING[text.model_type.removesuffix("_text")]
    config = kind(text_config=text.to_dict(), vision_config=tower, tie_word_embeddings=text.tie_word_embeddings)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    if stacked:
        tensors = load_file(folder / "model.safetensors")
        fused = {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
        rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        assert len(rest) < len(tensors)
        save_file({**rest, **fused}, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return folder

"""Checkpoints of tiny models with the tokenizers of published ones.

A tokenizer more is an entry of `conversion.CONVERSIONS`, which makes its tokenizer.json, and one here.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.real import templates
from tests.real.conversion import tokenizer_file


@dataclass(frozen=True)
class Real:
    """What stands beside a tokenizer.json.

    Attributes:
        settings: tokenizer_config.json, as published.
        template: the chat template.
        config: of a tiny model of the same family, with the published size of the vocabulary.
    """

    settings: dict[str, Any]
    template: str
    config: dict[str, Any]


_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 1024}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_OF_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "errors": "replace", "add_prefix_space": False}
REAL = {
    "deepseek": Real(
        {
            "bos_token": templates.DEEPSEEK_BEGIN, "add_bos_token": True,
            "eos_token": templates.DEEPSEEK_END, "pad_token": templates.DEEPSEEK_END,
            "tokenizer_class": "LlamaTokenizerFast", "legacy": True,
        },
        templates.DEEPSEEK,
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 2, "num_key_value_heads": 2,
            "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "qwen3": Real(
        {**_OF_QWEN, "tokenizer_class": "Qwen2Tokenizer"},
        templates.QWEN,
        {**_HEADS, "model_type": "qwen3", "vocab_size": 151936},
    ),
    "qwen3.6": Real(
        {**_OF_QWEN, "tokenizer_class": "Qwen3_5Tokenizer"},
        templates.QWEN,
        {**_HEADS, "model_type": "qwen3", "vocab_size": 248320},
    ),
    "mistral": Real(
        {
            "bos_token": "<s>", "add_bos_token": True, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        templates.MISTRAL,
        {**_HEADS, "model_type": "mistral", "vocab_size": 131072, "sliding_window": None},
    ),
}  # fmt: skip


def make_folder(name: str, folder: Path, model: Any = None) -> Path:
    """A checkpoint of `model`, by default a random one, with the tokenizer `name`."""
    (model or tiny_model(name)).save_pretrained(folder)
    real = REAL[name]
    shutil.copy(tokenizer_file(name), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({**real.settings, "clean_up_tokenization_spaces": False}))
    (folder / "chat_template.jinja").write_text(real.template)
    return folder


def tiny_model(name: str, **sizes: int) -> Any:
    """A random model of two layers, with `sizes` instead of its own."""
    torch.manual_seed(0)
    config = {**_TINY, **REAL[name].config, **sizes}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.pop("model_type")](**config), dtype=torch.float32)


def reciting_model(name: str, said: list[int], broken: list[int]) -> Any:
    """A model that goes on from each token of `said` (at most 63, no two alike) with the next one, and from any other
    with any, half of the time with one of `broken`."""
    model = tiny_model(name, hidden_size=64)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "o_proj" in key or "down_proj" in key:  # what layers add to the residual stream
                weight.zero_()
        sees, says = model.get_input_embeddings().weight, model.get_output_embeddings().weight.zero_()
        sees[:], sees[said] = torch.eye(64)[63], torch.eye(64)[: len(said)]
        says[broken, 63] = math.log(len(says) / len(broken)) / 8  # the final norm makes 8 of 1
        says[said[1:]] = 40 * torch.eye(64)[: len(said) - 1]
    return model

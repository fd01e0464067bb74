"""Tiny models of the causal architectures of transformers, packed as the `hf` backend runs them and one at a time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instep.training.hf.model import Policy

_SMALL = {
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank",
    32: "hidden_size n_embd d_model word_embed_proj_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size n_inner d_ff",
    2: "num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_experts_per_tok eos_token_id",
    4: "num_attention_heads n_head n_heads attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts",
    64: "max_position_embeddings n_positions",
    97: "vocab_size vocab_size_per_layer_input",
    1: "n_group topk_group first_k_dense_replace n_shared_experts bos_token_id",
    0: "pad_token_id",
}
_TINY = {name: value for value, names in _SMALL.items() for name in names.split()}
LENGTHS = (6, 9)
_MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}

# What `hf` trains packed as transformers has it, to 1e-5 of log-probs and gradients; docs/models.md shows the list.
RIGHT = (
    "afmoe apertus arcee aria_text biogpt bitnet ctrl cwm diffllama dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo "
    "gemma gemma3_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe helium jetmoe llama "
    "minimax_m2 mistral mixtral olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe "
    "seed_oss smollm3 solar_open starcoder2"
).split()
# What it refuses, by a part of the message.
REFUSED = {
    "depend on tokens after it": "bloom codegen cpmant xglm",
    "those that it has alone": "bert-generation falcon_mamba jamba lfm2 mamba minimax nemotron_h openai-gpt "
    "qwen3_5_text qwen3_next rwkv",
    "its attention cannot be exchanged": "falcon gptj gpt_neo",
    "do not hand the packed segments on": "nemotron stablelm",
    "is not plain causal attention": "doge gemma2 gpt_oss vaultgemma",
    "more than its output embedding": "big_bird cohere cohere2 cohere2_moe modernbert-decoder nanochat recurrent_gemma",
    "transformers cannot run it in this way": "axk1 axk2 deepseek_v2 deepseek_v3 llama4_text mpt",
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default configuration of an architecture, made small wherever it has a number of a known name."""
    base = CONFIG_MAPPING[model_type]().get_text_config()
    given = base.to_dict()
    known = {name for name in _TINY if name in given or name in base.attribute_map}
    known -= {name for name in ("head_dim", "rotary_dim") if given.get(name) is None}
    return type(base)(**{name: _TINY[name] for name in known}, **_MORE.get(model_type, {}))


@dataclass
class Comparison:
    """The largest difference of log-probs, and the relative difference of the gradients."""

    log_probs: float
    gradients: float


def compare(model_type: str) -> Comparison:
    """Two samples packed, against transformers with its own attention, one sample at a time.

    Raises:
        ConfigError: the model is refused.
    """
    config = tiny_config(model_type)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    plain.eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    policy = Policy(copy.deepcopy(config), torch.float32, recompute=False)
    policy.model.load_state_dict(plain.state_dict())
    samples = [torch.randint(3, policy.vocab_size, (length,)) for length in LENGTHS]
    at = torch.cat([torch.arange(length) for length in LENGTHS])
    bounds = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    predicts = torch.cat([torch.arange(LENGTHS[0] - 1), LENGTHS[0] + torch.arange(LENGTHS[1] - 1)])
    targets = torch.cat([sample[1:] for sample in samples])
    weights = torch.linspace(-1, 1, len(targets))
    scale = torch.ones(len(targets))
    got = policy(torch.cat(samples), at, bounds, max(LENGTHS), predicts, targets, scale, False, check=True)[0]
    assert got is not None
    (got * weights).sum().backward()
    rows = [plain(input_ids=sample[None], use_cache=False).logits[0, :-1].float() for sample in samples]
    want = torch.cat(rows).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (want * weights).sum().backward()
    theirs: dict[str, Any] = {name: parameter.grad for name, parameter in plain.named_parameters()}
    off = total = 0.0
    for name, parameter in policy.model.named_parameters():
        a, b = (torch.zeros_like(parameter) if g is None else g for g in (parameter.grad, theirs[name]))
        off, total = off + float((a - b).square().sum()), total + float(b.square().sum())
    return Comparison(float((got - want).abs().max()), (off / total) ** 0.5)

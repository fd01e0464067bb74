"""Tiny models of the causal architectures of transformers, as the `hf` backend runs them and one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instep.training.hf.model import Policy
from instep.training.hf.shards import whole

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
_DELTA = {  # both kinds of layers
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "axk2"), {"num_key_value_heads": 4}),
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"]}),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},
}

# What `hf` trains packed as transformers has it, to 1e-5 of log-probs and gradients; docs/models.md shows the list.
PACKED = (
    "afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 "
    "diffllama dots1 ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma3_text gemma4_text glm glm4 glm4_moe gpt2 "
    "gpt_bigcode gpt_neox granite granitemoe helium jetmoe lfm2 lfm2_moe llama minimax_m2 mistral mixtral "
    "modernbert-decoder nanochat olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe "
    "qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text seed_oss smollm3 solar_open starcoder2"
).split()
# What it trains padded, as right, by a part of the reason.
PADDED = {
    "depend on other segments": "bloom codegen falcon_mamba jamba kimi_linear mamba minimax nemotron_h openai-gpt "
    "recurrent_gemma rwkv xglm",
    "its attention cannot be replaced": "falcon gpt_neo gptj",
    "do not pass the packed segments": "nemotron stablelm",
    "caps scores|has sinks|uses its own mask": "doge gemma2 gpt_oss llama4_text vaultgemma",
    "transformers cannot run it like this": "axk2 mpt",
}
REASONS = {name: reason for reason, names in PADDED.items() for name in names.split()}
# What tensor parallelism splits, as right; it refuses the others by name.
SPLIT = (
    "apertus arcee aria_text biogpt cohere cohere2 cohere2_moe cwm ernie4_5 exaone4 gemma gemma2 gemma3_text "
    "gemma4_text glm glm4 gpt_bigcode gpt_neo gpt_neox gptj granite granitemoe helium jamba lfm2 lfm2_moe llama "
    "mistral nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid opt phi phi3 phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_5_text recurrent_gemma seed_oss smollm3 stablelm starcoder2 vaultgemma"
).split()
# What it refuses: as they are, they are not causal.
REFUSED = "bert-generation big_bird cpmant".split()
# Those with a window that can be shorter than the samples here.
WINDOWED = (
    "afmoe cohere2 cohere2_moe cwm exaone4 gemma2 gemma3_text gemma4_text gpt_oss mistral mixtral modernbert-decoder "
    "olmo3 phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe starcoder2 vaultgemma"
).split()


def tiny_config(model_type: str, window: int | None = None) -> PretrainedConfig:
    """The default configuration of an architecture, made small wherever it has a number of a known name.

    Args:
        window: how many tokens a token sees in the layers that have a sliding window.
    """
    base = CONFIG_MAPPING[model_type]().get_text_config()
    given = base.to_dict()
    known = {name for name in _TINY if name in given or name in base.attribute_map}
    known -= {name for name in ("head_dim", "rotary_dim") if given.get(name) is None}
    settings = {name: _TINY[name] for name in known} | _MORE.get(model_type, {})
    if window is not None:
        settings |= {"sliding_window": window}
        settings |= {"use_sliding_window": True, "max_window_layers": 1} if "use_sliding_window" in given else {}
    return type(base)(**settings)


@dataclass
class Comparison:
    """The largest difference of log-probs, the relative difference of the gradients, and what users are told."""

    log_probs: float
    gradients: float
    remark: str


def compare(
    model_type: str,
    window: int | None = None,
    mesh: DeviceMesh | None = None,
    lengths: Sequence[int] = LENGTHS,
    recompute: str | None = None,
) -> Comparison:
    """Samples as a policy runs them, against transformers with its own attention, one sample at a time.

    Args:
        mesh: the ranks among which its layers are split (collective).

    Raises:
        ConfigError: the model is refused.
    """
    config = tiny_config(model_type, window)
    if mesh is not None:
        config.vocab_size += 1  # ranks divide it
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    plain.eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            elif mesh is not None:  # what a rank has of a norm is to differ from what the others have
                parameter.add_(0.3 * torch.randn_like(parameter))
    policy = Policy(copy.deepcopy(config), torch.float32, recompute)
    policy.model.load_state_dict(plain.state_dict())
    if mesh is not None:
        policy.parallelize(mesh)
    samples = [torch.randint(3, policy.vocab_size, (length,)) for length in lengths]
    at = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    predicts = torch.cat([torch.arange(a, b - 1) for a, b in pairwise(bounds.tolist())])
    targets = torch.cat([sample[1:] for sample in samples])
    weights = torch.linspace(-1, 1, len(targets))
    scale = torch.ones(len(targets))
    got = policy(torch.cat(samples), at, bounds, max(lengths), predicts, targets, scale, False, check=True)[0]
    assert got is not None
    (got * weights).sum().backward()
    if policy.parallel is not None:
        policy.parallel.sum_gradients()
    rows = [plain(input_ids=sample[None], use_cache=False).logits[0, :-1].float() for sample in samples]
    want = torch.cat(rows).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (want * weights).sum().backward()
    theirs: dict[str, Any] = {name: parameter.grad for name, parameter in plain.named_parameters()}
    off = total = 0.0
    for name, parameter in policy.model.named_parameters():
        a, b = (torch.zeros(parameter.shape) if g is None else whole(g) for g in (parameter.grad, theirs[name]))
        off, total = off + float((a - b).square().sum()), total + float(b.square().sum())
    return Comparison(float((got - want).detach().abs().max()), (off / total) ** 0.5, policy.remark)

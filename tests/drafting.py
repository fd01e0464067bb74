"""Tiny models whose next token hardly depends on those before, with a layer of multi-token prediction, for SGLang."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.distributed.mtp_oracle import Drafter
from tests.families import make_family

# SGLang joins DeepSeek's norms of embedding and state by a kernel for multiples of 256.
SIZES = {
    "qwen3_next": {
        "hidden_size": 512, "head_dim": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "deepseek_v3": {
        "hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 128, "moe_layer_freq": 1,
        "q_lora_rank": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip
NORM = {"qwen3_next": "mtp.norm.weight", "deepseek_v3": "model.layers.2.shared_head.norm.weight"}
PULL = {"qwen3_next": 5.0, "deepseek_v3": 6.0}  # towards the likeliest token


def make_policy(name: str, folder: Path) -> Path:
    """Make a model whose next token hardly depends on those before, and a layer that drafts the unlikeliest one."""
    make_family(name, folder, "bf16", **SIZES[name])
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "full_attention_interval": 4, "dtype": "bfloat16"}  # as published
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    embedding, hidden = model.model.embed_tokens.weight, model.config.hidden_size
    drafts = Drafter(model).weights()
    with torch.no_grad():
        common = torch.randn(hidden)
        embedding.copy_(common + 0.1 * torch.randn_like(embedding))
        model.lm_head.weight[9] += PULL[name] * common / common.norm() / hidden**0.5  # the likeliest token
    fc = next(n for n in drafts if n.endswith(("mtp.fc.weight", "eh_proj.weight")))
    drafts = {n: 0.1 * t if "_proj" in n else t for n, t in drafts.items()}
    drafts[fc] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    drafts[NORM[name]] = against(name, model.model.norm.weight.detach())
    own = {"model.embed_tokens.weight": embedding.detach(), "lm_head.weight": model.lm_head.weight.detach()}
    save(load_file(folder / "model.safetensors") | drafts | own, folder)
    return folder


def against(name: str, norm: torch.Tensor) -> torch.Tensor:
    """A norm that turns its states round. Qwen3-Next's norms multiply by 1 + weight."""
    return -2 - norm if name == "qwen3_next" else -norm


def save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    kept = {n: t if "e_score_correction" in n else t.to(torch.bfloat16) for n, t in weights.items()}
    save_file({n: t.contiguous() for n, t in kept.items()}, folder / "model.safetensors", {"format": "pt"})


def make_next(name: str, folder: Path, to: Path) -> Path:
    """Make the next version: all weights have changed, and the layer drafts what the model prefers."""
    shutil.copytree(folder, to)
    torch.manual_seed(11)
    weights = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    weights = {n: t * (1 + 0.05 * torch.randn_like(t)) for n, t in weights.items()}
    weights[NORM[name]] = against(name, weights[NORM[name]])
    save(weights, to)
    return to


def chi_square(counts: Counter[int], probs: torch.Tensor) -> float:
    """Pearson's statistic for each degree of freedom. Tokens that are expected fewer than ten times are one group."""
    num = sum(counts.values())
    likely = [int(t) for t in (probs * num >= 10).nonzero()]
    groups = [([t], float(probs[t])) for t in likely]
    rest = [t for t in range(len(probs)) if t not in likely]
    groups.append((rest, float(probs[rest].sum())))
    off = sum((sum(counts[t] for t in ts) - num * p) ** 2 / (num * max(p, 1e-4)) for ts, p in groups)
    return off / (len(groups) - 1)

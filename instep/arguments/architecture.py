"""Flags of the shape of latent attention and of experts, as slime's and vime's model scripts have them, and what
config.json says about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from instep.arguments.flag import COUNT, Flag, Number, switch
from instep.models.shape import FAMILIES, expert_layers, num_experts, rope_by_layer

_LAYERS = 10**4


def layer_pattern(text: str) -> int | tuple[int, ...]:
    """`N` (each N-th layer has experts), or a list of 0 and 1 as Python writes it: `[0]*3+[1]*58`, `[0,1,1]`.

    Raises:
        ValueError: it is neither.
    """
    if text.isdecimal() and 0 < int(text) <= _LAYERS:
        return int(text)
    pattern: list[int] = []
    for term in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:\(?\[([01](?:,[01])*)\]\)?)(?:\*(\d{1,4}))?", term)
        if match is None:
            raise ValueError("is neither a number nor a list like [0]*3+[1]*58")
        pattern += [int(i) for i in match[1].split(",")] * int(match[2] or 1)
    return tuple(pattern)


_FACTOR = Number(float, 0, 1e6)

FLAGS = (
    switch("--multi-latent-attention", "queries, keys and values come from latent vectors", "M"),
    Flag("--q-lora-rank", COUNT, None, "width of the latent vector of queries", whose="M"),
    Flag("--kv-lora-rank", COUNT, None, "width of the latent vector of keys and values", whose="M"),
    Flag("--qk-head-dim", COUNT, None, "width of a head of queries and keys, without its rotary part", whose="M"),
    Flag("--qk-pos-emb-head-dim", COUNT, None, "width of the rotary part", whose="M"),
    Flag("--v-head-dim", COUNT, None, "width of a head of values", whose="M"),
    Flag("--rotary-scaling-factor", _FACTOR, None, "by how much YaRN makes the context longer", whose="M"),
    Flag("--mscale", _FACTOR, None, "of YaRN", whose="M"),
    Flag("--mscale-all-dim", _FACTOR, None, "of YaRN", whose="M"),
    Flag("--moe-layer-freq", layer_pattern, None, "which layers have experts: N, or [0]*3+[1]*58", whose="M"),
    Flag("--moe-shared-expert-intermediate-size", COUNT, None, "width of the experts of every token", whose="M"),
    switch("--moe-router-pre-softmax", "the weights of experts are not divided by their sum", "M"),
    Flag("--moe-router-score-function", choices=("softmax", "sigmoid"), help="of the router", whose="M"),
    switch("--moe-router-enable-expert-bias", "a bias of each expert takes part in their choice", "M"),
    Flag("--moe-router-num-groups", COUNT, None, "groups of experts", whose="M"),
    Flag("--moe-router-group-topk", COUNT, None, "groups of a token", whose="M"),
    Flag("--moe-router-topk-scaling-factor", _FACTOR, None, "of the weights of experts", whose="M"),
)


def in_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says about `FLAGS`; None: it does not say."""
    family, rope = FAMILIES.get(config.get("model_type", "")), next(iter(rope_by_layer(config).values()), {})
    latent, sigmoid = (family.latent, family.sigmoid) if family else (None, None)
    has_experts = family is not None and family.experts and num_experts(config) > 0
    layers = expert_layers(config, family) if family and has_experts and config.get("num_hidden_layers") else None
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    normalized = config.get("norm_topk_prob")
    return {
        "--multi-latent-attention": latent,
        "--q-lora-rank": config.get("q_lora_rank"),
        "--kv-lora-rank": config.get("kv_lora_rank"),
        "--qk-head-dim": config.get("qk_nope_head_dim"),
        "--qk-pos-emb-head-dim": config.get("qk_rope_head_dim"),
        "--v-head-dim": config.get("v_head_dim"),
        "--rotary-scaling-factor": rope.get("factor", 1.0),
        "--mscale": rope.get("mscale"),
        "--mscale-all-dim": rope.get("mscale_all_dim"),
        "--moe-layer-freq": layers and tuple(int(i in layers) for i in range(config["num_hidden_layers"])),
        "--moe-shared-expert-intermediate-size": shared if has_experts else None,
        # Sigmoids are divided by their sum or not whatever this flag says.
        "--moe-router-pre-softmax": not normalized if has_experts and not sigmoid and normalized is not None else None,
        "--moe-router-score-function": ("sigmoid" if sigmoid else "softmax") if has_experts else None,
        "--moe-router-enable-expert-bias": sigmoid if has_experts else None,
        "--moe-router-num-groups": config.get("n_group"),
        "--moe-router-group-topk": config.get("topk_group"),
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor"),
    }

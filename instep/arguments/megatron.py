"""Megatron's flags: those that act in instep, and the table of all flags of Megatron core_v0.16.1.

The model is built from config.json of `--hf-checkpoint`. The shape flags of slime's and vime's model scripts are
accepted and compared with it. Each other flag that names a field of a megatron-core configuration is passed on
(`args.megatron_overrides`), unless instep sets that field itself.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import Flag, Number, read_flags, text
from instep.arguments.model import known_config
from instep.models.shape import FAMILIES, expert_layers, num_experts, rope_by_layer

_NO_EFFECT_WHY = "batches are packed, and as long as their samples"
_NO_EFFECT = f"accepted for Megatron's scripts, without effect: {_NO_EFFECT_WHY}"
NOT_HONOURED = "a flag of Megatron that instep's trainer does not support"


def layer_pattern(text: str) -> int | tuple[int, ...]:
    """Return `N` (each N-th layer has experts), or a list of 0 and 1 in Python's form: `[0]*3+[1]*58`, `[0,1,1]`.

    Raises:
        ValueError: the text is neither.
    """
    if text.isdecimal() and 0 < int(text) <= 10**4:
        return int(text)
    pattern: list[int] = []
    for term in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:\(?\[([01](?:,[01])*)\]\)?)(?:\*(\d{1,4}))?", term)
        if match is None:
            raise ValueError("is neither a number nor a list like [0]*3+[1]*58")
        pattern += [int(i) for i in match[1].split(",")] * int(match[2] or 1)
    return tuple(pattern)


SHAPE = read_flags(__file__, layer_pattern=layer_pattern, no_effect=_NO_EFFECT)

_INT, _FLOAT = Number(int, -(2**63), 2**63 - 1), Number(float, -1e38, 1e38)


def _element(value: str) -> Any:
    """Return a whole number, else a float, else text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return text(value)


@cache
def megatron_table() -> tuple[Flag, ...]:
    """Return Megatron's flags (names, types, defaults, choices of core_v0.16.1) with instep's status."""
    rows = json.loads(Path(__file__).with_name("megatron_table.json").read_text(encoding="ascii"))["flags"]
    verdicts = tomllib.loads(Path(__file__).with_name("megatron_verdicts.toml").read_text(encoding="ascii"))
    patterns = [(re.compile(pattern), *verdict) for pattern, *verdict in verdicts["not_passed"]]
    types: dict[str, Any] = {"int": _INT, "float": _FLOAT, "str": text, "true": bool, "false": bool, "on_off": bool}
    flags = []
    for row in rows:
        zero = ("0",) if row["type"] in ("int", "float") and row["default"] == 0 else ()
        name = row["names"][0]
        status, note, instead = _verdict(name, bool(row.get("config")) and row["type"] in types, patterns)
        instead = verdicts["instead"].get(name, instead) if status != "acts" else ""
        flags.append(
            Flag(
                name,
                types.get(row["type"], _element),
                row["default"],
                choices=tuple(row.get("choices", ())),
                nargs=row.get("nargs"),
                dest=row["dest"],
                aliases=tuple(row["names"][1:]),
                status=status,
                note=note,
                instead=instead,
                whose="M",
                constant=row["type"] != "false",
                neutral=tuple(verdicts["neutral"].get(name, zero if status != "acts" else ())),
            )
        )
    return tuple(flags)


def _verdict(name: str, is_field: bool, patterns: list[tuple[Any, ...]]) -> tuple[Any, str, str]:
    """Return the status of one of Megatron's flags, the reason, and what to use instead."""
    for pattern, status, *more in patterns:
        if pattern.match(name):
            note, instead = (*more, "", "")[:2]
            return status, note or NOT_HONOURED, instead
    return ("acts", "passed to megatron-core unchanged", "") if is_field else ("refused", NOT_HONOURED, "")


def shape_in_file(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values in config.json of the shape flags. None: config.json does not say (transformers' default)."""
    rope, family = config.get("rope_parameters") or {}, FAMILIES.get(config.get("model_type", ""))
    delta = family and family.delta
    heads, width = (config.get(name) for name in ("num_attention_heads", "hidden_size"))
    groups, base = config.get("num_key_value_heads", heads), config.get("rope_theta", rope.get("rope_theta"))
    head_dim = config.get("head_dim") or (width // heads if width and heads else None)
    biases = [bool(config[name]) for name in ("attention_bias", "mlp_bias") if name in config]
    gate = config.get("hidden_act", config.get("activation_function"))
    layer_norm = next((name for name in ("layer_norm_eps", "layer_norm_epsilon") if name in config), "")
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    rotated = (0.25 if delta else 1.0) if rotated is None and family else rotated
    tied = config.get("tie_word_embeddings")
    return {
        **{flag.name: config.get(flag.config) for flag in SHAPE.flags if flag.config},
        **_experts_in_file(config),
        "--num-experts": num_experts(config) or None,
        "--ffn-hidden-size": config.get("intermediate_size", config.get("moe_intermediate_size")),
        "--group-query-attention": None if groups is None else groups < heads,
        "--num-query-groups": groups,
        # Megatron does not read it for latent attention.
        "--kv-channels": None if family and family.latent else head_dim,
        "--normalization": "RMSNorm" if "rms_norm_eps" in config else "LayerNorm" if layer_norm else None,
        "--norm-epsilon": config.get("rms_norm_eps", config.get(layer_norm)),
        "--rotary-base": base,
        "--rotary-percent": rotated,
        "--position-embedding-type": "rope" if base or rope else config.get("position_embedding_type"),
        "--use-rotary-position-embeddings": True if base or rope else None,
        "--swiglu": None if gate is None else gate in ("silu", "swish"),
        "--qk-layernorm": family and (family.qk_norm or family.latent),
        "--attention-output-gate": delta,
        "--apply-layernorm-1p": delta,
        "--moe-shared-expert-gate": delta and num_experts(config) > 0,
        "--disable-bias-linear": True if family and not any(biases) else not any(biases) if biases else None,
        "--add-qkv-bias": family and family.qkv_bias,
        "--untie-embeddings-and-output-weights": None if tied is None else not tied,
    }


def _experts_in_file(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values in config.json about latent attention and experts."""
    family, rope = FAMILIES.get(config.get("model_type", "")), next(iter(rope_by_layer(config).values()), {})
    latent, sigmoid = (family.latent, family.sigmoid) if family else (None, None)
    has_experts = family is not None and family.experts and num_experts(config) > 0
    layers = expert_layers(config, family) if family and has_experts and config.get("num_hidden_layers") else None
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    shared = config.get("shared_expert_intermediate_size", shared)
    normalized = config.get("norm_topk_prob", True if family and family.delta else None)
    return {
        "--multi-latent-attention": latent,
        "--rotary-scaling-factor": rope.get("factor", 1.0),
        "--mscale": rope.get("mscale"),
        "--mscale-all-dim": rope.get("mscale_all_dim"),
        "--moe-layer-freq": layers and tuple(int(i in layers) for i in range(config["num_hidden_layers"])),
        "--moe-shared-expert-intermediate-size": shared if has_experts else None,
        # For sigmoids, this flag does not decide whether they are divided by their sum.
        "--moe-router-pre-softmax": not normalized if has_experts and not sigmoid and normalized is not None else None,
        "--moe-router-score-function": ("sigmoid" if sigmoid else "softmax") if has_experts else None,
        "--moe-router-enable-expert-bias": sigmoid if has_experts else None,
    }


# ---- rules -----------------------------------------------------------------------------------------------------------


def shape(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that the shape flags agree with config.json: the model is built from it."""
    config = known_config(args)
    in_file = shape_in_file(config) if config else {}
    for flag in (flag for flag in SHAPE.flags if flag.attribute in given):
        mine, actual = getattr(args, flag.attribute), in_file.get(flag.name)
        if flag.name == "--moe-layer-freq" and isinstance(mine, int):  # each mine-th layer
            mine = tuple(int(i % mine == 0) for i in range(config.get("num_hidden_layers", 0)))
        if flag.help == _NO_EFFECT:
            yield Problem(f"has no effect: {_NO_EFFECT_WHY}", flag.name, refused=False)
        elif flag.name in in_file and actual is None:
            what = "is not compared: config.json decides, and does not have it"
            yield Problem(what, flag.name, refused=False)
        elif flag.name in in_file and mine != actual:
            what = f"is {mine}, but config.json says {actual}"
            yield Problem(what, flag.name, "leave it out: the checkpoint decides")


RULES = (shape,)

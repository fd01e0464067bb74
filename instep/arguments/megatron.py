"""Megatron's flags: those that act in instep, and the table of all flags of Megatron core_v0.16.1.

The shape flags of slime's and vime's model scripts are accepted, and compared with config.json of `--hf-checkpoint`,
which is what the model is built from. Every further flag that names a field of a megatron-core configuration is handed
through (`args.megatron_overrides`), unless instep sets that field itself.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from instep.arguments import architecture
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import COUNT, Flag, FlagGroup, Number, accepted, switch, text
from instep.arguments.model import known_config
from instep.models.shape import FAMILIES, num_experts

_NO_EFFECT_WHY = "batches are packed, and as long as their samples"
_NO_EFFECT = f"accepted for Megatron's scripts, without effect: {_NO_EFFECT_WHY}"
ZERO = Number(float, 0, 0)
NOT_HONOURED = "a flag of Megatron that is not honoured by instep's trainer"

SHAPE = FlagGroup(
    "Megatron: shape of the model (compared with config.json of --hf-checkpoint)",
    (
        Flag("--num-layers", COUNT, None, "layers", whose="VSM"),
        Flag("--hidden-size", COUNT, None, "width", whose="VSM"),
        Flag("--ffn-hidden-size", COUNT, None, "width of the MLP", whose="VSM"),
        Flag("--num-experts", COUNT, None, "experts of a layer", whose="M"),
        Flag("--moe-router-topk", COUNT, None, "experts of a token", whose="M"),
        Flag("--moe-ffn-hidden-size", COUNT, None, "width of an expert", whose="M"),
        Flag("--num-attention-heads", COUNT, None, "query heads", whose="VSM"),
        *architecture.FLAGS,
        switch("--group-query-attention", "fewer key heads than query heads", "VSM"),
        Flag("--num-query-groups", COUNT, None, "key heads", whose="VSM"),
        Flag("--kv-channels", COUNT, None, "width of a head", whose="VSM"),
        Flag("--vocab-size", COUNT, None, "entries of the vocabulary", whose="VSM"),
        Flag("--normalization", choices=("LayerNorm", "RMSNorm"), help="kind of norm", whose="VSM"),
        Flag("--norm-epsilon", Number(float, 0, 1, above=True), None, "epsilon of the norms", whose="VSM"),
        Flag("--rotary-base", Number(float, 1, 1e12), None, "base of the rotary embedding", whose="VSM"),
        Flag("--rotary-percent", Number(float, 0, 1, above=True), None, "part of a head that is rotated", whose="M"),
        Flag("--position-embedding-type", choices=("rope",), help="kind of position embedding", whose="M"),
        switch("--use-rotary-position-embeddings", "rotary embedding", "VSM"),
        switch("--swiglu", "gated MLP with SiLU", "VSM"),
        switch("--qk-layernorm", "norms on queries and keys", "VSM"),
        Flag("--disable-bias-linear", bool, None, "linear layers without bias", whose="VSM"),
        switch("--add-qkv-bias", "bias in the query, key and value layers", "M"),
        switch("--untie-embeddings-and-output-weights", "input and output embeddings are two tensors", "M"),
        Flag("--make-vocab-size-divisible-by", COUNT, 128, "pad the vocabulary to this times TP", whose="M"),
        Flag("--seq-length", COUNT, None, _NO_EFFECT, whose="VSM"),
        Flag(
            "--max-position-embeddings", COUNT, None, _NO_EFFECT, aliases=("--max-positional-embedding",), whose="VSM"
        ),
        Flag("--attention-dropout", ZERO, 0.0, "only 0: dropout would part the trainer from the engine", whose="M"),
        Flag("--hidden-dropout", ZERO, 0.0, "only 0: dropout would part the trainer from the engine", whose="M"),
        *accepted("gradients are always summed in fp32", "M", "--accumulate-allreduce-grads-in-fp32"),
        *accepted("a step that is not finite is always skipped", "M", "--no-check-for-nan-in-loss-and-grad"),
    ),
)

_INT, _FLOAT = Number(int, -(2**63), 2**63 - 1), Number(float, -1e38, 1e38)


def _element(value: str) -> Any:
    """A whole number, else a float, else text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return text(value)


@cache
def megatron_table() -> tuple[Flag, ...]:
    """All flags of Megatron's command line (names, types, defaults, choices of core_v0.16.1) with instep's status."""
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
    """Status, why, and what instead, of a flag of Megatron."""
    for pattern, status, *more in patterns:
        if pattern.match(name):
            note, instead = (*more, "", "")[:2]
            return status, note or NOT_HONOURED, instead
    return ("acts", "handed to megatron-core as it is", "") if is_field else ("refused", NOT_HONOURED, "")


def shape_in_file(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about the flags of the model's shape; None: it does not, as transformers has a default."""
    rope, family = config.get("rope_parameters") or {}, FAMILIES.get(config.get("model_type", ""))
    heads, width = (config.get(name) for name in ("num_attention_heads", "hidden_size"))
    groups, base = config.get("num_key_value_heads", heads), config.get("rope_theta", rope.get("rope_theta"))
    head_dim = config.get("head_dim") or (width // heads if width and heads else None)
    biases = [bool(config[name]) for name in ("attention_bias", "mlp_bias") if name in config]
    gate = config.get("hidden_act", config.get("activation_function"))
    layer_norm = next((name for name in ("layer_norm_eps", "layer_norm_epsilon") if name in config), "")
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    tied = config.get("tie_word_embeddings")
    return {
        "--num-layers": config.get("num_hidden_layers"),
        "--hidden-size": width,
        "--ffn-hidden-size": config.get("intermediate_size"),
        **architecture.in_file(config),
        "--num-experts": num_experts(config) or None,
        "--moe-router-topk": config.get("num_experts_per_tok"),
        "--moe-ffn-hidden-size": config.get("moe_intermediate_size"),
        "--num-attention-heads": heads,
        "--group-query-attention": None if groups is None else groups < heads,
        "--num-query-groups": groups,
        # Megatron does not read it where attention is latent.
        "--kv-channels": None if family and family.latent else head_dim,
        "--vocab-size": config.get("vocab_size"),
        "--normalization": "RMSNorm" if "rms_norm_eps" in config else "LayerNorm" if layer_norm else None,
        "--norm-epsilon": config.get("rms_norm_eps", config.get(layer_norm)),
        "--rotary-base": base,
        "--rotary-percent": 1.0 if rotated is None and family else rotated,
        "--position-embedding-type": "rope" if base or rope else config.get("position_embedding_type"),
        "--use-rotary-position-embeddings": True if base or rope else None,
        "--swiglu": None if gate is None else gate in ("silu", "swish"),
        "--qk-layernorm": family and (family.qk_norm or family.latent),
        "--disable-bias-linear": True if family and not any(biases) else not any(biases) if biases else None,
        "--add-qkv-bias": family and family.qkv_bias,
        "--untie-embeddings-and-output-weights": None if tied is None else not tied,
    }


# ---- rules -----------------------------------------------------------------------------------------------------------


def only_megatron(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.train_backend != "hf":
        return
    if args.use_distributed_optimizer:
        yield Problem("FSDP2 spreads the optimizer anyway", "--use-distributed-optimizer", "leave it out")
    if args.megatron_overrides:
        names = {flag.attribute: flag.name for flag in megatron_table() if flag.status == "acts"}
        for name in args.megatron_overrides:
            yield Problem("only megatron-core has it, not --train-backend hf", names[name], "leave it out")
    if "make_vocab_size_divisible_by" in given:
        what = "has no effect with --train-backend hf, which pads no vocabulary"
        yield Problem(what, "--make-vocab-size-divisible-by", refused=False)


def shape(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Flags of the model's shape must agree with config.json, which the model is built from."""
    config = known_config(args)
    in_file = shape_in_file(config) if config else {}
    for flag in (flag for flag in SHAPE.flags if flag.attribute in given):
        mine, actual = getattr(args, flag.attribute), in_file.get(flag.name)
        if flag.name == "--moe-layer-freq" and isinstance(mine, int):  # each mine-th layer
            mine = tuple(int(i % mine == 0) for i in range(config.get("num_hidden_layers", 0)))
        if flag.help == _NO_EFFECT:
            yield Problem(f"has no effect: {_NO_EFFECT_WHY}", flag.name, refused=False)
        elif flag.name in in_file and actual is None:
            yield Problem("is not compared: config.json does not say, and it decides", flag.name, refused=False)
        elif flag.name in in_file and mine != actual:
            yield Problem(
                f"is {mine}, but config.json says {actual}", flag.name, "leave it out: the checkpoint decides"
            )


RULES = (shape, only_megatron)

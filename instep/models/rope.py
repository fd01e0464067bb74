"""Rotary positions whose frequencies depend on the longest sequence of a batch in transformers (`dynamic`, `longrope`).

Trainer and engines fix them for the whole run, as vLLM does, so no log-prob depends on the other samples of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from instep.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_ALREADY_LONG = ("longrope", "llama3", "yarn", "deepseek_yarn")  # their models use the scaled length
# What transformers and vLLM interpret differently.
_AMBIGUOUS = {"short_mscale", "long_mscale", "attention_factor", "max_trained_positions", "alpha"}


def context_length(config: Mapping[str, Any], max_model_len: int | None) -> int | None:
    """Return the most tokens of a sequence: `max_model_len`, or vLLM's default for a model; None if both are unknown.

    The default of a `longrope` model is its first training length, which its short factors are for. Flags, trainer and
    the embedded engine all use this function.

    Args:
        config: the entries of config.json, or those of a transformers configuration.
    """
    if max_model_len is not None:
        return max_model_len
    found = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
    ropes = rope_by_layer(config)
    if found is None:
        return None
    if any(rope["rope_type"] == "longrope" for rope in ropes.values()):
        return int(config.get("original_max_position_embeddings") or found)
    if "gemma3" in str(config.get("model_type")):
        return int(found)
    factors = [rope.get("factor") for rope in ropes.values() if rope["rope_type"] not in _ALREADY_LONG]
    return int(found * next((f for f in factors if f), 1))


def rope_by_layer(config: Mapping[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Return rotary parameters by the layer type that uses them (None: all layers), each with its `rope_type`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    out: dict[str | None, dict[str, Any]] = {**nested} if nested else {None: rope} if rope else {}
    return {layer: {**one, "rope_type": _rope_type(one)} for layer, one in out.items()}


def _rope_type(rope: Mapping[str, Any]) -> str:
    name = str(rope.get("rope_type") or rope.get("type") or "default")
    return "longrope" if name == "su" else name


def fix_rope(model: PreTrainedModel, max_model_len: int | None) -> None:
    """Give every rotary embedding of `model` fixed frequencies.

    `longrope`: its long factors if sequences may exceed the original length (`context_length`), otherwise the short
        ones.
    `dynamic`: those of its own length, `max_position_embeddings`. Source: vLLM 0.32, `rotary_embedding`.

    Raises:
        ConfigError: rotary positions of these kinds that cannot be fixed, or that vLLM interprets differently.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config.get_text_config()
    entries = config.to_dict()
    changing = {k: rope for k, rope in rope_by_layer(entries).items() if rope["rope_type"] in ("dynamic", "longrope")}
    length, num_fixed = context_length(entries, max_model_len), 0
    for rope in changing.values():
        _check(model, rope, entries)
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            prefix, more = ("", {}) if layer is None else (f"{layer}_", {"layer_type": layer})
            kept = getattr(module, f"{prefix}inv_freq", None)
            if layer in changing and kept is not None:
                seq_len = length if kind == "longrope" else None
                frequencies, scaling = ROPE_INIT_FUNCTIONS[str(kind)](config, None, seq_len=seq_len, **more)
                kept.copy_(frequencies)
                setattr(module, f"{prefix}attention_scaling", scaling)
                # Then a forward pass updates nothing.
                module.rope_type = "default" if layer is None else {**module.rope_type, layer: "default"}
                num_fixed += 1
    if changing and not num_fixed:
        raise _cannot(model, next(iter(changing.values())), "its model computes them with its own code")


def _check(model: PreTrainedModel, rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters that trainer and engine would interpret differently."""
    given = {name for name in _AMBIGUOUS if rope.get(name) is not None}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope["rope_type"] == "longrope" and factor is not None and original:
        ratio = config["max_position_embeddings"] / original
        given |= {f"factor {factor}, not {ratio:g} = max_position_embeddings / original"} if factor != ratio else set()
    if given:
        raise _cannot(model, rope, f"vLLM and transformers interpret {', '.join(sorted(given))} differently")


def _cannot(model: PreTrainedModel, rope: Mapping[str, Any], why: str) -> ConfigError:
    return ConfigError(
        f"its rotary positions ({rope['rope_type']}) change with the longest sequence of a batch, and cannot be fixed: "
        f"{why}",
        where=f"{type(model).__name__}, rope_parameters of config.json",
        remedy="use a model with rope_type default, linear, llama3, yarn, or plain dynamic or longrope",
    )

"""Rotary positions whose frequencies transformers picks by the longest sequence of a batch (`dynamic`, `longrope`).

Trainer and engines fix them for the whole run, as vLLM does, so that no log-prob depends on what shares a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def context_length(config: Any, max_model_len: int | None) -> int:
    """The most tokens of a sequence: `max_model_len`, or vLLM's default for this `config`.

    The default of a `longrope` model is the length that it was first trained with, for which its short factors are.
    """
    if max_model_len is not None:
        return max_model_len
    if "longrope" in rope_types(config):
        return int(getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    return int(config.max_position_embeddings)


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions that a model has, by transformers' names; none without any."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    return {str(one["rope_type"]) for one in by_layer if "rope_type" in one}


def fix_rope(model: PreTrainedModel, max_model_len: int | None) -> None:
    """Give every rotary embedding of `model` the frequencies that it keeps.

    `longrope`: its long factors if sequences of more than the original length are possible (`context_length`), else the
    short ones. `dynamic`: those of its own length, `max_position_embeddings`. Source: vLLM 0.32, `rotary_embedding`.

    Raises:
        ConfigError: rotary positions of these kinds that cannot be fixed.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config.get_text_config()
    changing = rope_types(config) & {"dynamic", "longrope"}
    if not changing:
        return
    rope = config.rope_parameters
    known = {"short_mscale", "long_mscale", "max_trained_positions", "alpha"}
    modules = [m for m in model.modules() if getattr(m, "rope_type", None) in changing and hasattr(m, "inv_freq")]
    if not modules or known & rope.keys():
        raise ConfigError(
            f"its rotary positions ({', '.join(sorted(changing))} with {', '.join(sorted(rope))}) change with the "
            "longest sequence of a batch, and cannot be fixed",
            where=f"{type(model).__name__}, rope_parameters of config.json",
            remedy="use a model with rope_type default, linear, llama3, yarn, or plain dynamic or longrope",
        )
    length = context_length(config, max_model_len) if "longrope" in changing else None
    for module in modules:
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[module.rope_type](config, None, seq_len=length)
        module.inv_freq.copy_(frequencies)
        module.rope_type = "default"  # nothing is updated in a forward pass

"""Published models that have layers for images. Only their language model is trained.

Their config.json has the language model's entries in `text_config`, and their tensors are `model.language_model.*`,
`lm_head.*`, `model.visual.*` and `mtp.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LANGUAGE_MODELS = {"qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"}  # transformers loads them from such a folder
IMAGES = "model.visual."


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the entries of its `text_config`, which win; `architectures` stays the model's."""
    text = config.get("text_config")
    return {**config, **text, "architectures": config.get("architectures")} if isinstance(text, dict) else dict(config)


def has_language_model(config: Mapping[str, Any]) -> bool:
    """Return whether config.json (of `with_text`) is of a model with images whose language model can be trained."""
    return "text_config" in config and config.get("model_type") in LANGUAGE_MODELS


def image_names(names: Iterable[str]) -> list[str]:
    """Return the names of a checkpoint's tensors of layers for images."""
    return sorted(name for name in names if name.startswith(IMAGES))


def said_of_images(names: Iterable[str]) -> str:
    """Return a log line about the layers for images, which are not trained; empty without these layers."""
    images = image_names(names)
    what = f"{len(images)} tensors of layers for images ({images[0]}, ...) are not trained: " if images else ""
    return what and f"{what}exports hold them as they are, and engines keep those that they have loaded"

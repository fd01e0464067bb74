"""Multi-token prediction: extra modules of checkpoints; the model is loaded and trained without them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instep.models.images import IMAGES, said_of_images

KEYS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")  # of config.json, for one number
_MODULE = re.compile(r"(model\.)?mtp[._]")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def num_mtp_layers(config: Mapping[str, Any], default: int = 0) -> int:
    """Return the number of layers of multi-token prediction in a config.json.

    Args:
        default: of a config.json that says nothing: Qwen3-Next has one such layer.
    """
    return next((int(config[key]) for key in KEYS if config.get(key) is not None), int(default))


def mtp_names(names: Iterable[str], num_layers: int, num_mtp: int) -> list[str]:
    """Return the sorted names of multi-token prediction in a checkpoint: layers behind the model's own `num_layers`
    (DeepSeek-V3, GLM-4.5), or modules of that name (Qwen3-Next, MiMo)."""
    behind = range(num_layers, num_layers + num_mtp if num_layers else 0)
    layers = ((name, _LAYER.match(name)) for name in names)
    return sorted(name for name, at in layers if (int(at[1]) in behind if at else _MODULE.match(name)))


def left_out(names: Sequence[str]) -> str:
    """Return log lines about tensors that are not read, also of layers for images; empty if there are no names."""
    mtp = [name for name in names if not name.startswith(IMAGES)]
    what = f"{len(mtp)} tensors of multi-token prediction ({mtp[0]}, ...) are not read: " if mtp else ""
    what = what and f"{what}they are neither trained nor synced, and exports have those of --hf-checkpoint"
    return "\n".join(filter(None, (what, said_of_images(names))))

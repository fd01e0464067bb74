"""The config.json of a Hugging Face folder, as the other files of the folder correct it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.models.files import has_own_head
from instep.models.images import with_text
from instep.models.mtp import KEYS
from instep.system.documents import read_json

QUANTIZATION = "hf_quant_config.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return a folder's config.json with the entries of its `text_config`. Raises: OSError, ValueError."""
    config = read_json(Path(folder) / "config.json")
    if not isinstance(config, dict):
        raise ValueError("is JSON, but not an object like '{\"key\": 1}'")
    check_types(config)
    return as_stored(config, folder)


def check_types(config: Mapping[str, Any]) -> None:
    """Refuse a config.json with entries of wrong types, if they decide anything before a model is made.

    Raises: ValueError.
    """
    names, how = config.get("architectures"), config.get("quantization_config")
    groups = how.get("config_groups") if isinstance(how, dict) else None
    inner = list(groups.values()) if isinstance(groups, dict) else []
    inner += [group.get("weights") for group in inner if isinstance(group, dict)]
    kinds: list[tuple[str, object, type]] = [
        ("architectures", names, list),
        *(("architectures", name, str) for name in (names if isinstance(names, list) else [])),
        ("model_type", config.get("model_type"), str),
        ("quantization_config", how, dict),
        *(("quantization_config.config_groups", part, dict) for part in (groups, *inner)),
        *((key, config.get(key), int) for key in (*KEYS, "num_hidden_layers")),
    ]
    wrong = [name for name, value, kind in kinds if not isinstance(value, (kind, type(None)))]
    if wrong:
        raise ValueError(f"its entry {wrong[0]} has a wrong type")


def as_stored(config: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Return `config` with the entries of its `text_config`, corrected by the other files of its folder: add the
    `quantization_config` that ModelOpt writes into hf_quant_config.json; untie the embeddings if the output layer
    differs from them.

    Raises: OSError, ValueError.
    """
    config = with_text(config)
    if config.get("tie_word_embeddings") and has_own_head(str(folder)):
        config = {**config, "tie_word_embeddings": False}
    file = Path(folder) / QUANTIZATION
    if config.get("quantization_config") or not file.exists():
        return config
    there = read_json(file)
    how = there.get("quantization", there) if isinstance(there, dict) else None
    if not isinstance(how, dict):
        raise ValueError(f"{QUANTIZATION} has no object `quantization`")
    of_weights = how.get("quant_algo", "")  # null, if only the cache is quantized
    return config if of_weights is None else {**config, "quantization_config": {"quant_method": "modelopt", **how}}

"""Reads the weights of a Hugging Face checkpoint: finds the file of each tensor, and opens the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from instep.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint, by the tensor's name; reads the index or the header of the only file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        if (folder / INDEX).exists():
            weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"no readable index of weights: {error}",
            where=str(folder / INDEX),
            remedy="copy or download the checkpoint again",
        ) from error
    with opened(folder / SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), folder / SINGLE)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a file of weights with `safetensors.safe_open` (`keys()`, `get_tensor(name)`, `get_slice(name)`).

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a tensor that the block asks for.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        remedy = f"give a folder with {SINGLE}, or its shards and {INDEX}; restore or download the checkpoint"
        raise CheckpointError(f"no readable weights: {error}", where=str(file), remedy=remedy) from error

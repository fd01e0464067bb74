"""Read the weights of a Hugging Face checkpoint: find the file of each tensor, and open the files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from instep.checkpoints.safe_pickle import MAX_NAME
from instep.errors import CheckpointError
from instep.models.files import INDEX, SINGLE, weight_map
from instep.system.documents import open_regular

PARTS = ("qweight", "qzeros", "scales", "g_idx")  # the tensors that replace a layer's `weight` in GPTQ and AWQ
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 63  # torch counts them in an int64, an empty dimension as 1


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, by the tensor's name; read the index or the only file's header.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        if (folder / INDEX).exists():
            return {name: folder / file for name, file in weight_map(folder).items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{INDEX} cannot be read: {error}",
            where=str(folder / INDEX),
            remedy="copy or download the checkpoint again",
        ) from error
    with opened(folder / SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), folder / SINGLE)


def weight_names(files: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tensors of each weight of a checkpoint, by name: several for a weight packed by GPTQ or AWQ."""
    out: dict[str, list[str]] = {}
    for name in files:
        module, _, last = name.rpartition(".")
        packed = last in PARTS and f"{module}.qweight" in files
        out.setdefault(f"{module}.weight" if packed else name, []).append(name)
    return out


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a file of weights with `safetensors.safe_open` (`keys()`, `get_tensor(name)`, `get_slice(name)`).

    Raises:
        CheckpointError: the file is missing or damaged, holds a tensor that cannot exist, or does not have one that the
            block reads.
    """
    try:
        open_regular(file).close()  # a read of a pipe would wait
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                if len(name) > MAX_NAME or not name.isprintable():
                    raise SafetensorError(f"the name of a tensor is not a text of at most {MAX_NAME} characters")
                shape = tensors.get_slice(name).get_shape()
                # The size of its file bounds a tensor that has elements.
                too_many = 0 in shape and math.prod(n or 1 for n in shape) >= MAX_ELEMENTS
                if too_many or len(shape) > MAX_DIMENSIONS:
                    raise SafetensorError(f"{name} has the shape {shape!s:.100}, which no tensor can have")
            yield tensors
    except (OSError, SafetensorError) as error:
        remedy = f"give a folder with {SINGLE}, or its shards and {INDEX}; restore or download the checkpoint"
        raise CheckpointError(f"no readable weights: {error}", where=str(file), remedy=remedy) from error

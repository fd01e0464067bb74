"""The weight files of a Hugging Face folder, by their headers; without torch."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from instep.system.documents import open_regular, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST = 10**8  # bytes of a header, by the format
_AT_ONCE = 1 << 24  # bytes that are compared at a time
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor, by the tensor's name, from the index of a Hugging Face folder.

    Raises: OSError, ValueError.
    """
    index = read_json(folder / INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError("it has no weight_map, an object with the name of a file for each tensor")
    if elsewhere := [file for file in files.values() if "/" in file or file in ("", ".", "..") or "\0" in file]:
        raise ValueError(f"it names {elsewhere[0]!r:.80}, which is not a file in its folder")
    return files


def safetensors_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, by tensor name; a wrong length in the file cannot cause an allocation.

    Raises: OSError, ValueError.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST, os.fstat(file.fileno()).st_size):
            raise ValueError(f"{path.name} is not a safetensors file: its header would have {length:,} bytes")
        try:
            header = json.loads(file.read(length))
        except RecursionError:
            raise ValueError(f"{path.name} is not a safetensors file: its header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is not a safetensors file: its header is not a JSON object")
    return header


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, chosen as transformers does: a folder may hold it in several forms."""
    whole = folder / SINGLE
    if (folder / INDEX).exists():
        return [folder / name for name in sorted(set(weight_map(folder).values()))]
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def has_own_head(folder: str) -> bool:
    """Return whether the output layer in a folder differs from the embedding. If so and config.json ties them, it is
    wrong, also for transformers and vLLM. Return False for damaged files, which other checks report."""
    try:
        return _has_own_head(tuple((path, path.stat().st_mtime_ns) for path in tensor_files(Path(folder))))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


@lru_cache(maxsize=16)
def _has_own_head(files: tuple[tuple[Path, int], ...]) -> bool:
    head, embedding = None, None
    for path, _ in files:
        for name, tensor in safetensors_header(path).items():
            head = (path, tensor) if name.endswith("lm_head.weight") else head
            embedding = (path, tensor) if name.endswith(_EMBEDDINGS) else embedding
    return head is not None and embedding is not None and not _same(*head, *embedding)


def _same(path: Path, tensor: dict[str, Any], other_path: Path, other: dict[str, Any]) -> bool:
    if any(tensor[key] != other[key] for key in ("dtype", "shape")):
        return False
    with open_regular(path) as file, open_regular(other_path) as other_file:
        for one, offsets in ((file, tensor["data_offsets"]), (other_file, other["data_offsets"])):
            one.seek(8 + int.from_bytes(one.read(8), "little") + offsets[0])
            left = offsets[1] - offsets[0]
        while left > 0:
            if file.read(size := min(left, _AT_ONCE)) != other_file.read(size):
                return False
            left -= size
    return True

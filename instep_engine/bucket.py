"""Reads a bucket of weights from shared memory, or a checkpoint, and compares it with its manifest, byte by byte."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from instep_engine.manifest import BucketManifest, WeightMismatch, digest, dtype_name, tensor_bytes, tensors_of
from instep_engine.place import NoPlace, check_checkpoint, open_bucket


def read_bucket(manifest: BucketManifest) -> dict[str, torch.Tensor]:
    """Return the tensors of a bucket, in private mapped memory, after a check of every tensor's digest.

    Raises:
        WeightMismatch: the file is missing, or is not in the folder of a run of this user (`place.py`); a record
            contradicts it or itself, a name comes twice, or a digest differs.
    """
    first = manifest.tensors[0].name if manifest.tensors else None
    try:
        fd = open_bucket(manifest.path)
        try:
            data = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError, NoPlace) as error:  # a ValueError for an empty file
        raise WeightMismatch(f"the bucket {manifest.path} cannot be read: {error}", first) from error
    tensors = tensors_of(manifest.tensors, data)
    for t in manifest.tensors:
        if digest(tensor_bytes(tensors[t.name])) != t.digest:
            raise WeightMismatch(f"{t.name}: the bytes received do not have the digest of those sent", t.name)
    return tensors


def read_checkpoint(
    path: str, manifest: BucketManifest | None, alive: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint or an adapter on disk, compared with its manifest if one was sent.

    Args:
        alive: called before each tensor.

    Raises:
        WeightMismatch: it cannot be read, is not in the folder of a run (`place.py`), or differs from what was sent.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    try:
        check_checkpoint(path)
        for file in sorted(Path(path).glob("*.safetensors")) or [Path(path) / "model.safetensors"]:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    alive()
                    tensors[name] = opened.get_tensor(name)
    except (OSError, ValueError, NoPlace, SafetensorError) as error:  # a ValueError for a path with a null byte
        raise WeightMismatch(f"no checkpoint in {path}: {error}") from error
    if manifest is None:
        return tensors
    records = {t.name: t for t in manifest.tensors}
    for name in sorted(tensors.keys() ^ records.keys()):
        raise WeightMismatch(f"{name} {'was not sent' if name in tensors else 'is not in the checkpoint'}", name)
    for name, t in records.items():
        alive()
        tensor = tensors[name]
        got = (tuple(tensor.shape), dtype_name(tensor.dtype), digest(tensor_bytes(tensor)))
        if got != (t.shape, t.dtype, t.digest):
            raise WeightMismatch(f"{name} of the checkpoint is not what was sent", name)
    return tensors


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a local checkpoint's tensors by name, from the file headers; empty without one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes |= {name: tuple(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    return shapes

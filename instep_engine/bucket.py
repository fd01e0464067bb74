"""Reads a bucket of weights from shared memory, or a checkpoint, and compares it with its manifest, byte by byte."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from instep_engine.manifest import BucketManifest, WeightMismatch, digest, dtype_name, tensor_bytes
from instep_engine.place import NoPlace, check_checkpoint, open_bucket


def read_bucket(manifest: BucketManifest) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, in private mapped memory, after a check of every tensor's digest.

    Raises:
        WeightMismatch: the file is missing, or lies in no folder of a run of this user (`place.py`); a record
            contradicts it or itself, a name comes twice, a digest differs.
    """
    tensors: dict[str, torch.Tensor] = {}
    first = manifest.tensors[0].name if manifest.tensors else None
    try:
        fd = open_bucket(manifest.path)
        try:
            data = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError, NoPlace) as error:  # a ValueError for an empty file
        raise WeightMismatch(f"the bucket {manifest.path} cannot be read: {error}", first) from error
    for t in manifest.tensors:
        dtype = getattr(torch, t.dtype, None)
        if t.name in tensors:
            raise WeightMismatch(f"{t.name} came twice", t.name)
        if not isinstance(dtype, torch.dtype) or math.prod(t.shape) * dtype.itemsize != t.nbytes:
            raise WeightMismatch(f"{t.name}: {t.nbytes} bytes of shape {t.shape} and dtype {t.dtype}", t.name)
        if not 0 <= t.offset <= data.numel() - t.nbytes:
            raise WeightMismatch(f"{t.name} lies outside the bucket of {data.numel()} bytes", t.name)
        flat = data[t.offset : t.offset + t.nbytes]
        if digest(tensor_bytes(flat)) != t.digest:
            raise WeightMismatch(f"{t.name}: the bytes received do not have the digest of those sent", t.name)
        aligned = flat.clone() if t.offset % dtype.itemsize else flat
        try:
            tensors[t.name] = aligned.view(dtype).view(t.shape)
        except RuntimeError as error:  # a dtype that is no plain number's
            raise WeightMismatch(f"{t.name}: {error}", t.name) from error
    return tensors


def read_checkpoint(
    path: str, manifest: BucketManifest | None, alive: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint or an adapter on disk, compared with its manifest where one was sent.

    Args:
        alive: called before each tensor.

    Raises:
        WeightMismatch: it cannot be read, is not in the folder of a run (`place.py`), or is not what was sent.
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

"""Reads a bucket of weights from shared memory, and compares it (or a checkpoint) with its manifest, byte by byte."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from instep_engine.place import NoPlace, open_bucket


class WeightMismatch(Exception):
    """The weights are not those that were announced. The message begins with the tensor's name, which instep parses."""

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(f"WeightMismatch[{tensor or ''}]: {message}")
        self.tensor = tensor


@dataclass(frozen=True)
class Record:
    """One tensor of a bucket: Hugging Face name, shape, dtype ("float32"), offset, bytes, and their xxh3-128."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    path: str
    version: str
    nonce: str
    tensors: tuple[Record, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        try:
            tensors = tuple(Record(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"])
            texts = [data["path"], data["version"], data["nonce"], *(x for t in tensors for x in (t.name, t.dtype))]
            numbers = [n for t in tensors for n in (*t.shape, t.offset, t.nbytes)]
            if not all(type(x) is str for x in texts) or not all(type(n) is int and n >= 0 for n in numbers):
                raise TypeError("a name, a path, a shape or a number is of another kind")
            return cls(data["path"], data["version"], data["nonce"], tensors)
        except (KeyError, TypeError) as error:
            raise WeightMismatch(f"the manifest is malformed: {error!r}") from error


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, in private mapped memory that outlives the file, after a check of every tensor's digest.

    Raises:
        WeightMismatch: the file is missing, or lies in no folder of a run of this user (`place.py`); a record
            contradicts it or itself, a name comes twice, a digest differs.
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
    tensors: dict[str, torch.Tensor] = {}
    for t in manifest.tensors:
        dtype = getattr(torch, t.dtype, None)
        if t.name in tensors:
            raise WeightMismatch(f"{t.name} came twice", t.name)
        if not isinstance(dtype, torch.dtype) or math.prod(t.shape) * dtype.itemsize != t.nbytes:
            raise WeightMismatch(f"{t.name}: {t.nbytes} bytes of shape {t.shape} and dtype {t.dtype}", t.name)
        if not 0 <= t.offset <= data.numel() - t.nbytes:
            raise WeightMismatch(f"{t.name} lies outside the bucket of {data.numel()} bytes", t.name)
        flat = data[t.offset : t.offset + t.nbytes]
        if xxhash.xxh3_128_hexdigest(memoryview(flat.numpy())) != t.digest:
            raise WeightMismatch(f"{t.name}: the bytes received do not have the digest of those sent", t.name)
        aligned = flat.clone() if t.offset % dtype.itemsize else flat
        tensors[t.name] = aligned.view(dtype).view(t.shape)
    return tensors


def compare(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare what a checkpoint holds with its manifest. Raises WeightMismatch, which names the tensor."""
    records = {t.name: t for t in manifest.tensors}
    for name in sorted(tensors.keys() ^ records.keys()):
        raise WeightMismatch(f"{name} {'was not sent' if name in tensors else 'is not in the checkpoint'}", name)
    for name, t in records.items():
        tensor = tensors[name]
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        got = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), xxhash.xxh3_128_hexdigest(data))
        if got != (t.shape, t.dtype, t.digest):
            raise WeightMismatch(f"{name} of the checkpoint is not what was sent", name)

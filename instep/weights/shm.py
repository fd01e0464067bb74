"""Both ends of a sync over shared memory (way `shm`): weights become buckets in /dev/shm, and tensors again.

Only rank 0 writes; the other ranks take part in the gathering. A bucket is handed on as soon as it is full, so that
engines load one while the next is gathered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from instep.weights.manifest import BucketManifest, TensorRecord, digest, dtype_name, tensor_bytes
from instep.weights.source import WeightSource


def publish_shm(
    source: WeightSource,
    directory: Path,
    *,
    version: str,
    nonce: str,
    bucket_bytes: int,
    emit: Callable[[BucketManifest], None],
) -> int:
    """Write all weights as buckets of about `bucket_bytes` into `directory`; collective over the ranks.

    Args:
        emit: called on the writing rank with each finished bucket's manifest.

    Returns:
        The number of bytes written by this rank.
    """
    records: list[TensorRecord] = []
    parts: list[torch.Tensor] = []
    total = offset = num_buckets = 0

    def flush() -> None:
        nonlocal records, parts, total, offset, num_buckets
        path = directory / f"{nonce}-{num_buckets}.bin"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "wb") as file:
            for part in parts:
                file.write(tensor_bytes(part))
        emit(BucketManifest(str(path), version, nonce, tuple(records)))
        total, num_buckets = total + offset, num_buckets + 1
        records, parts, offset = [], [], 0

    for spec, tensor in source:
        if tensor is None:
            continue
        part = tensor.detach().to("cpu", copy=True).contiguous()  # valid only until the next one: keep a copy
        data = tensor_bytes(part)
        records.append(
            TensorRecord(spec.name, tuple(part.shape), dtype_name(part.dtype), offset, data.nbytes, digest(data))
        )
        parts.append(part)
        offset += data.nbytes
        if offset >= bucket_bytes:
            flush()
    if records:
        flush()
    return total


class BucketMismatch(Exception):
    """A bucket is not what its manifest says; `tensor` is the first one concerned."""

    def __init__(self, message: str, tensor: str | None):
        super().__init__(message)
        self.tensor = tensor


def read_bucket(manifest: BucketManifest) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, in private mapped memory, after each one's bytes were found to have their digest.

    Raises:
        BucketMismatch: no such file, a record outside it or at odds with itself, a name twice, another digest.
    """
    tensors: dict[str, torch.Tensor] = {}
    first = manifest.tensors[0].name if manifest.tensors else None
    try:
        data = torch.from_file(manifest.path, size=os.path.getsize(manifest.path), dtype=torch.uint8)
    except (OSError, RuntimeError) as error:  # torch's word for an empty file
        raise BucketMismatch(f"the bucket {manifest.path} cannot be read: {error}", first) from error
    for t in manifest.tensors:
        dtype = getattr(torch, t.dtype, None)
        if t.name in tensors:
            raise BucketMismatch(f"{t.name} came twice", t.name)
        if not isinstance(dtype, torch.dtype) or math.prod(t.shape) * dtype.itemsize != t.nbytes:
            raise BucketMismatch(f"{t.name}: {t.nbytes} bytes of shape {t.shape} and dtype {t.dtype}", t.name)
        if not 0 <= t.offset <= data.numel() - t.nbytes:
            raise BucketMismatch(f"{t.name} lies outside the bucket of {data.numel()} bytes", t.name)
        flat = data[t.offset : t.offset + t.nbytes]
        if digest(tensor_bytes(flat)) != t.digest:
            raise BucketMismatch(f"{t.name}: the bytes received do not have the digest of those sent", t.name)
        aligned = flat.clone() if t.offset % dtype.itemsize else flat
        tensors[t.name] = aligned.view(dtype).view(t.shape)
    return tensors


def source_digests(source: WeightSource) -> dict[str, str]:
    """Digest of every weight by name, for naming the culprit when a proof fails; collective, empty but on rank 0."""
    return {spec.name: digest(tensor_bytes(t.detach().to("cpu"))) for spec, t in source if t is not None}

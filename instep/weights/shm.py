"""The trainer's side of a sync over shared memory (way `shm`): weights become buckets in files under /dev/shm.

Only rank 0 writes; the other ranks take part in the gathering. A bucket is handed on as soon as it is full, so that
engines load one while the next is gathered.
"""

from __future__ import annotations

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


def source_digests(source: WeightSource) -> dict[str, str]:
    """Digest of every weight by name, for naming the culprit when a proof fails; collective, empty but on rank 0."""
    return {spec.name: digest(tensor_bytes(t.detach().to("cpu"))) for spec, t in source if t is not None}

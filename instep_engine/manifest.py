"""Manifests of a weight sync: one record per sent tensor, with a digest of its bytes.

The controller receives a manifest from the trainer and passes it to each engine over HTTP. The bytes travel in a
shared-memory file or a checkpoint on disk. The engine compares the two before it loads anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xxhash


class WeightMismatch(Exception):
    """The weights are not the announced ones; `tensor` is the first wrong one.

    instep parses the text of an engine's answer for it.
    """

    def __init__(self, what: str, tensor: str | None = None):
        super().__init__(what, tensor)
        self.what, self.tensor = what, tensor

    def __str__(self) -> str:
        return f"WeightMismatch[{self.tensor or ''}]: {self.what}"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a bucket: Hugging Face name, shape, dtype ("float32"), offset, bytes, and their digest if known."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    digest: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorRecord:
        return cls(**{**data, "shape": tuple(data["shape"])})


@dataclass(frozen=True)
class BucketManifest:
    """The manifest of one bucket. `nonce` is new in every sync, so that an old bucket cannot pass for a new one.

    `config` is that of an adapter: peft's `adapter_config.json`, with its number of tensors as `num_tensors`.
    """

    path: str
    version: str
    nonce: str
    tensors: tuple[TensorRecord, ...]
    config: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BucketManifest:
        """Read the result of `to_json`. Raises: KeyError, TypeError for anything else."""
        tensors = tuple(map(TensorRecord.from_json, data["tensors"]))
        texts = [data["path"], data["version"], data["nonce"], *(x for t in tensors for x in (t.name, t.dtype))]
        numbers = [n for t in tensors for n in (*t.shape, t.offset, t.nbytes)]
        if not all(type(x) is str for x in texts) or not all(type(n) is int and n >= 0 for n in numbers):
            raise TypeError("a name, a path, a shape or a number is of another kind")
        return cls(data["path"], data["version"], data["nonce"], tensors)


def tensors_of(records: Iterable[TensorRecord], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a bucket by name: views of its bytes `data`, if they are aligned.

    Raises:
        WeightMismatch: a record contradicts the bucket or itself, or a name comes twice.
    """
    tensors: dict[str, torch.Tensor] = {}
    for t in records:
        dtype = getattr(torch, t.dtype, None)
        if t.name in tensors:
            raise WeightMismatch(f"{t.name} came twice", t.name)
        if not isinstance(dtype, torch.dtype) or math.prod(t.shape) * dtype.itemsize != t.nbytes:
            raise WeightMismatch(f"{t.name}: {t.nbytes} bytes of shape {t.shape} and dtype {t.dtype}", t.name)
        if not 0 <= t.offset <= data.numel() - t.nbytes:
            raise WeightMismatch(f"{t.name} is outside the bucket of {data.numel()} bytes", t.name)
        flat = data[t.offset : t.offset + t.nbytes]
        aligned = flat.clone() if t.offset % dtype.itemsize else flat
        try:
            tensors[t.name] = aligned.view(dtype).view(t.shape)
        except RuntimeError as error:  # the dtype is not a plain number's
            raise WeightMismatch(f"{t.name}: {error}", t.name) from error
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


DIGEST_KIND = "xxh3-128"


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh3-128 of the tensor's bytes, copied to the host if necessary."""
    return digest(tensor_bytes(tensor.detach().to("cpu")))


def record_of(name: str, tensor: torch.Tensor, offset: int = 0) -> TensorRecord:
    """Return the record of a contiguous CPU tensor at `offset` of its bucket."""
    data = tensor_bytes(tensor)
    return TensorRecord(name, tuple(tensor.shape), dtype_name(tensor.dtype), offset, data.nbytes, digest(data))

"""The memory of an engine that shares its weights, as the trainer maps it; the way `single-copy` writes into it.

Each rank of the engine has a manifest, `memory-RANK.json` in a folder of the run: how its memory is opened, and in
which slices of it each weight lies, under its Hugging Face name. A rank of TP has a slice of a weight; what is fused
in the engine (q, k and v; gate and up) is several weights, each a slice.

`_OPENERS` is all that knows of what kind a memory is: a file that both map, on a CPU. On a GPU it would be the CUDA
IPC handle of a parameter.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from instep.errors import SyncError
from instep.weights.manifest import digest, dtype_name, tensor_bytes
from instep.weights.place import NoPlace, open_bucket
from instep.weights.source import TensorSpec

SAMPLE_KIND = "xxh3-128 of a sample"
SAMPLE_LENGTH = 4096  # elements, about
AGAIN = "start engine and trainer from one --hf-checkpoint and in one dtype, or use --weight-sync shm"


@dataclass(frozen=True)
class Slice:
    """One slice of a weight: its `view` in an engine's memory, and where its elements are in the whole weight."""

    view: torch.Tensor
    source_offset: int
    source_stride: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether its elements follow each other in the memory and in the whole weight."""
        pairs = zip(self.view.shape, self.source_stride, self.view.stride(), strict=True)
        return self.view.is_contiguous() and all(size == 1 or theirs == ours for size, theirs, ours in pairs)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of the whole, contiguous weight."""
        return whole.as_strided(self.view.shape, self.source_stride, whole.storage_offset() + self.source_offset)


class EngineMemory:
    """The weights of one engine, as all of its ranks hold them.

    Args:
        ranks: the manifests, rank by rank.
        lock: a file descriptor that keeps other trainers away until it is closed.

    Attributes:
        nonces: by which an engine's memory differs from that of one that was started anew.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]], lock: int | None = None):
        self.nonces = [str(rank["nonce"]) for rank in ranks]
        self.dtype = str(ranks[0]["dtype"])
        self.architecture = str(ranks[0]["architecture"])
        self._lock = lock
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.slices: list[dict[str, list[Slice]]] = []  # rank by rank, by name
        for rank in ranks:
            memories = [_OPENERS[memory["kind"]](memory) for memory in rank["memories"]]
            self.shapes |= {name: tuple(t["shape"]) for name, t in rank["tensors"].items()}
            self.dtypes |= {name: str(t["dtype"]) for name, t in rank["tensors"].items()}
            slices = {}
            for name, tensor in rank["tensors"].items():
                dtype = getattr(torch, tensor["dtype"])
                slices[name] = [_slice(record, memories[record["memory"]], dtype, name) for record in tensor["slices"]]
            self.slices.append(slices)

    def close(self) -> None:
        """Let another trainer attach."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raise SyncError unless the engine has exactly the weights of the trainer; it names the tensor."""
        ours = {spec.name: spec for spec in specs}
        for name in sorted(ours.keys() ^ self.shapes.keys()):
            has, lacks = ("trainer", "engine") if name in ours else ("engine", "trainer")
            raise self._differs(f"the {has} has {name}, the {lacks} has not")
        for name, spec in ours.items():
            if spec.shape != self.shapes[name]:
                raise self._differs(f"{name} is {spec.shape} in the trainer and {self.shapes[name]} in the engine")
            if (dtype := dtype_name(spec.dtype)) != self.dtypes[name]:
                raise self._differs(f"{name} is {dtype} in the trainer and {self.dtypes[name]} in the engine")

    def _differs(self, what: str) -> SyncError:
        return SyncError(what, where=f"the memory of the engine ({self.architecture}, {self.dtype})", remedy=AGAIN)

    def whole(self, name: str) -> torch.Tensor | None:
        """The view of a weight that lies in one piece in the memory of the only rank; None for any other.

        Slices that follow each other are one piece: Phi-3's fused q, k and v are loaded one by one.
        """
        if len(self.slices) != 1:
            return None
        parts = sorted(self.slices[0][name], key=lambda part: part.source_offset)
        shape, first, end = self.shapes[name], parts[0].view, 0
        for part in parts:
            here = part.view.data_ptr() == first.data_ptr() + end * first.element_size()
            if part.source_offset != end or not here or not part.in_order:
                return None
            end += part.view.numel()
        return first.as_strided(shape, torch.empty(shape, device="meta").stride()) if end == math.prod(shape) else None

    @torch.no_grad()
    def write(self, name: str, whole: torch.Tensor) -> None:
        """Write a weight into all of its slices."""
        whole = whole.detach().contiguous()
        for rank in self.slices:
            for part in rank.get(name, ()):
                part.view.copy_(part.of(whole))

    def digests(self) -> list[dict[str, str]]:
        """Rank by rank the digest of a sample of each weight, as the engine takes it from its parameters."""
        return [
            {name: digest(b"".join(_sample(part.view) for part in parts)) for name, parts in rank.items()}
            for rank in self.slices
        ]


def attach(folder: Path, *, lock: bool) -> EngineMemory:
    """The memory of the engine that shares its weights in `folder`.

    Args:
        lock: keep other trainers away from it as long as this process lives, or until `EngineMemory.close`.

    Raises:
        SyncError: no engine does, it cannot be opened, or another trainer is attached to it.
    """
    held = _lock(folder / "memory-0.json") if lock else None  # an engine that is started anew has a new file
    try:
        ranks = [json.loads((folder / "memory-0.json").read_text())]
        ranks += [json.loads((folder / f"memory-{i}.json").read_text()) for i in range(1, ranks[0]["num_ranks"])]
        return EngineMemory(ranks, held)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, NoPlace) as error:
        if held is not None:
            os.close(held)
        raise SyncError(
            f"the memory in which the engine shares its weights cannot be opened: {error!r}",
            where=str(folder),
            remedy="see the engine's log; --weight-sync shm needs no such memory",
        ) from error


def nonce(folder: Path) -> str:
    """The nonce of the first rank's memory, for which nothing is opened; empty where there is none."""
    try:
        return str(json.loads((folder / "memory-0.json").read_text())["nonce"])
    except (OSError, ValueError, KeyError):
        return ""


def sample_digest(tensor: torch.Tensor) -> str:
    """The digest of a sample of a whole weight."""
    return digest(_sample(tensor))


def _sample(tensor: torch.Tensor) -> memoryview:
    """The bytes of about `SAMPLE_LENGTH` elements, spread over the tensor (as in `instep_vllm/memory.py`)."""
    each = max(1, round(SAMPLE_LENGTH ** (1 / max(1, tensor.ndim))))
    few = tensor.detach()[tuple(slice(None, None, -(-size // each) or 1) for size in tensor.shape)]
    return tensor_bytes(few.cpu())


def _slice(record: Mapping[str, Any], memory: torch.Tensor, dtype: torch.dtype, name: str) -> Slice:
    shape, stride, offset = record["shape"], record["stride"], record["offset"]
    length = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if not 0 <= offset <= offset + length * dtype.itemsize <= memory.numel():
        raise ValueError(f"{name} lies outside the memory of {memory.numel()} bytes")
    flat = memory[offset : offset + length * dtype.itemsize].view(dtype)
    return Slice(flat.as_strided(shape, stride), record["source_offset"], tuple(record["source_stride"]))


def _lock(path: Path) -> int | None:
    """A file descriptor that holds the lock of `path`; None where there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SyncError(
            "another trainer is attached to this engine's weights",
            where=str(path),
            remedy="end it first: two trainers cannot write into one memory",
        ) from error
    return fd


def _open_file(memory: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of the file, mapped."""
    fd = open_bucket(memory["path"], os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, memory["bytes"]), dtype=torch.uint8)
    finally:
        os.close(fd)


_OPENERS: dict[str, Callable[[Mapping[str, Any]], torch.Tensor]] = {"file": _open_file}

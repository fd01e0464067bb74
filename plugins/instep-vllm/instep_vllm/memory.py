"""Moves the weights of this worker's model into memory that the trainer maps, and writes down what lies where.

A weight of the checkpoint lies in slices of the model's parameters (fused, and with TP a part of it). The map of names
to slices is recorded while vLLM's own `load_weights` copies a checkpoint into that memory; no architecture is known
here. `record` of a slice: the memory's number, the offset in bytes, shape and stride in it, and offset and stride (in
elements) of the same elements in the weight of the checkpoint.

On a CPU the memory is one file (`file_memory`). On a GPU each parameter would be a memory of its own that is opened by
its CUDA IPC handle; only `file_memory` and the reader (`instep/weights/memory.py`) know of it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 64  # bytes, of each parameter
LENGTH = 4096  # elements of a sample, about


class CannotShare(Exception):
    """The weights of this model cannot be shared with a trainer."""


def file_memory(folder: Path, rank: int, num_bytes: int) -> tuple[dict[str, Any], torch.Tensor]:
    """A new file in `folder`, mapped by all who open it: how it is opened, and its bytes as a uint8 tensor.

    Raises:
        CannotShare: there is no room for it.
    """
    path = folder / f"memory-{rank}-{secrets.token_hex(8)}.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # a file with holes would end the process when they are written
        data = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    except OSError as error:
        path.unlink()
        raise CannotShare(
            f"{num_bytes / 1e9:,.2f} GB of weights do not fit into {folder}: {error.strerror}; enlarge /dev/shm "
            "(docker: --shm-size), or --weight-sync shm"
        ) from error
    finally:
        os.close(fd)
    return {"kind": "file", "path": str(path), "bytes": num_bytes}, data


@dataclass(frozen=True)
class Slice:
    """One slice of a weight: `view` in this worker's memory, and where its elements are in the whole weight."""

    view: torch.Tensor
    source_offset: int
    source_stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of the whole weight."""
        whole = whole.contiguous()
        return whole.as_strided(self.view.shape, self.source_stride, whole.storage_offset() + self.source_offset)

    def record(self) -> dict[str, Any]:
        return {
            "memory": 0,
            "offset": self.offset,
            "shape": list(self.view.shape),
            "stride": list(self.view.stride()),
            "source_offset": self.source_offset,
            "source_stride": list(self.source_stride),
        }


class Recorder(TorchDispatchMode):
    """Sees every `copy_` from a tensor of the checkpoint into `memory`, and keeps its slice by the tensor's name."""

    def __init__(self, memory: torch.Tensor):
        super().__init__()
        self._begin, self._end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        self.sources: dict[str, torch.Tensor] = {}
        self.slices: dict[str, list[Slice]] = {}
        self.unknown: list[tuple[int, tuple[int, ...]]] = []  # what was copied from elsewhere: offset and shape

    def seen(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.sources[name] = tensor.contiguous()  # kept, so that no address is used twice
            yield name, self.sources[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._begin <= args[0].data_ptr() < self._end:
            self._copied(args[0], args[1])
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        offset, address = target.data_ptr() - self._begin, source.data_ptr()
        for name, whole in reversed(self.sources.items()):
            begin = whole.data_ptr()
            if begin <= address < begin + whole.numel() * whole.element_size() and source.dtype == whole.dtype:
                place = (address - begin) // whole.element_size()
                self.slices.setdefault(name, []).append(
                    Slice(target.detach(), place, tuple(source.expand_as(target).stride()), offset)
                )
                return
        self.unknown.append((offset, tuple(target.shape)))


def sample(tensor: torch.Tensor) -> memoryview:
    """The bytes of about `LENGTH` elements, spread over the tensor."""
    each = max(1, round(LENGTH ** (1 / max(1, tensor.ndim))))
    few = tensor.detach()[tuple(slice(None, None, -(-size // each) or 1) for size in tensor.shape)]
    return memoryview(few.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def write_manifest(
    folder: Path,
    rank: int,
    about: Mapping[str, Any],
    memory: Mapping[str, Any],
    slices: Mapping[str, list[Slice]],
    shapes: Mapping[str, Iterable[int]],
) -> str:
    """Write `memory-RANK.json` as a whole; returns the nonce in it, by which a trainer knows an engine's new memory."""
    nonce = secrets.token_hex(8)
    tensors = {
        name: {
            "shape": list(shapes[name]),
            "dtype": str(parts[0].view.dtype).removeprefix("torch."),
            "slices": [part.record() for part in parts],
        }
        for name, parts in slices.items()
    }
    text = json.dumps({**about, "rank": rank, "nonce": nonce, "memories": [memory], "tensors": tensors})
    hidden = folder / f".memory-{rank}-{nonce}"
    with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    hidden.rename(folder / f"memory-{rank}.json")
    return nonce

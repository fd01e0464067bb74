"""The code by which an engine's worker shares the weights of its model with a trainer, and records their places.

A weight of the checkpoint is in slices of the model's parameters (fused, and with TP a part of it). In vLLM the map of
names to slices is recorded while its own `load_weights` copies a checkpoint into them; no model is known here. `record`
of a slice: the memory's number, the offset in bytes, shape and stride in it, and offset and stride (in elements) of the
same elements in the weight of the checkpoint.

On a CPU all parameters move into one memory, a file (`file_memory`). On a GPU each parameter stays where it is. Its
storage is a memory that other processes open by its CUDA IPC handle (`cuda_memories`). See `mapped.py`.
"""

from __future__ import annotations

import bisect
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from instep_engine.mapped import cuda_record, file_record, new_file
from instep_engine.place import process_mark

ALIGNMENT = 64  # bytes, of each parameter
LENGTH = 4096  # elements of a sample, approximately
_SETS_ALL = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # for rows that only pad a vocabulary


class CannotShare(Exception):
    """The weights of this model cannot be shared with a trainer."""


@dataclass(frozen=True)
class Memory:
    """One memory: how to open it, and its addresses in this process."""

    record: dict[str, Any]
    begin: int
    end: int


def file_memory(folder: Path, rank: int, num_bytes: int) -> tuple[Memory, torch.Tensor]:
    """Return a new file in `folder`, mapped by all its users, and its bytes as a uint8 tensor.

    Raises:
        CannotShare: there is no room for it.
    """
    for left in folder.glob(f"memory-{rank}-*.bin"):
        left.unlink()  # of an engine that has ended; processes that map it keep it
    path = folder / f"memory-{rank}-{secrets.token_hex(8)}.bin"
    try:
        data = new_file(path, num_bytes)
    except OSError as error:
        raise CannotShare(
            f"{num_bytes / 1e9:,.2f} GB of weights do not fit into {folder}: {error.strerror}; enlarge /dev/shm "
            "(docker: --shm-size), or use --weight-sync shm"
        ) from error
    return Memory(file_record(path, num_bytes), data.data_ptr(), data.data_ptr() + num_bytes), data


def move(parameters: Iterable[nn.Parameter], folder: Path, rank: int) -> Memory:
    """Give each parameter a place in one memory, with its values. Raises CannotShare: there is no room for it."""
    places, end = [], 0
    for parameter in parameters:
        places.append((parameter, end))
        end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    memory, data = file_memory(folder, rank, end)
    for parameter, offset in places:
        view = data[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
    return memory


def cuda_memories(parameters: Iterable[torch.Tensor], device: torch.device) -> list[Memory]:
    """Return the storages of parameters on a GPU, each once, as another process on the same GPU opens them.

    They must outlive the trainer: the engine never frees a parameter.

    Raises:
        CannotShare: the allocator's memory has no IPC handles.
    """
    torch.cuda.synchronize(device)  # processes that open them must find the weights
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    memories = []
    storages = [parameter.data.untyped_storage() for parameter in parameters if parameter.numel()]
    for begin, storage in {storage.data_ptr(): storage for storage in storages}.items():
        try:
            record = {**cuda_record(storage), "uuid": uuid}
        except RuntimeError as error:
            what = f"the memory of a weight has no CUDA IPC handle: {error}"
            raise CannotShare(f"--weight-sync single-copy: {what}; use --weight-sync shm") from error
        memories.append(Memory(record, begin, begin + record["bytes"]))
    return memories


@dataclass(frozen=True)
class Slice:
    """One slice of a weight: its `view` in a worker's memory, and the place of its elements in the whole weight.

    Attributes:
        target: the number of the parameter, if `Recorder` has seen it.
    """

    view: torch.Tensor
    source_offset: int
    source_stride: tuple[int, ...]
    target: int = -1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of the whole, contiguous weight."""
        return whole.as_strided(self.view.shape, self.source_stride, whole.storage_offset() + self.source_offset)

    def held(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the contents of the slice if it holds `whole`: in its dtype, on its device."""
        return self.of(whole.contiguous()).to(self.view.device, self.view.dtype)

    def record(self, memories: Sequence[Memory]) -> dict[str, Any]:
        address = self.view.data_ptr()
        number = next(i for i, memory in enumerate(memories) if memory.begin <= address < memory.end)
        return {
            "memory": number,
            "offset": address - memories[number].begin,
            "shape": list(self.view.shape),
            "stride": list(self.view.stride()),
            "source_offset": self.source_offset,
            "source_stride": list(self.source_stride),
        }


class Ranges:
    """The addresses of tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        found = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), i) for i, t in enumerate(tensors)]
        self._ranges = sorted(found)
        self._begins = [begin for begin, _, _ in self._ranges]

    def holding(self, address: int) -> int | None:
        """Return the number of the tensor that has this address; None without one."""
        place = bisect.bisect_right(self._begins, address) - 1
        return self._ranges[place][2] if place >= 0 and address < self._ranges[place][1] else None


class Recorder(TorchDispatchMode):
    """Records writes into parameters while weights are loaded, and keeps the slices of plain copies.

    Attributes:
        sources: the weights by name; slices: the copied ones by name.
        written: the numbers of the parameters that were copied into, and how many elements.
        unknown: the shapes of copies from other sources; changed: whether anything but a copy has written.
        spoiled: the names of sources that the model has changed.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]):
        super().__init__()
        self._ranges = Ranges(parameters)
        self.sources: dict[str, torch.Tensor] = {}
        self.slices: dict[str, list[Slice]] = {}
        self.written: list[tuple[int, int]] = []
        self.unknown: list[tuple[int, ...]] = []
        self.spoiled: list[str] = []
        self.changed = False

    def seen(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.sources[name] = tensor.contiguous()  # kept, so that no address is used twice
            yield name, self.sources[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = (kwargs or {}).get("out", args[0] if args else None)
        if func._schema.is_mutable and isinstance(written, torch.Tensor):
            target = self._ranges.holding(written.data_ptr())
            if target is None:
                if (name := self._source_at(written.data_ptr())) is not None:
                    self.spoiled.append(name)
            elif func is torch.ops.aten.copy_.default:
                self._copied(target, args[0], args[1])
            elif func not in _SETS_ALL:
                self.changed = True
        return result

    def _source_at(self, address: int) -> str | None:
        """Return the name of the source at this address. Models mostly load the latest one, so that comes first."""
        for name, whole in reversed(self.sources.items()):
            if whole.data_ptr() <= address < whole.data_ptr() + whole.nbytes:
                return name
        return None

    def _copied(self, number: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.written.append((number, target.numel()))
        if (name := self._source_at(source.data_ptr())) is not None:
            whole = self.sources[name]
            if source.dtype == whole.dtype and whole.is_contiguous():
                place = (source.data_ptr() - whole.data_ptr()) // whole.element_size()
                stride = tuple(source.expand_as(target).stride())
                self.slices.setdefault(name, []).append(Slice(target.detach(), place, stride, number))
                return
        self.unknown.append(tuple(target.shape))


def check_record(recorder: Recorder, model: nn.Module, vocabulary: type[nn.Module]) -> None:
    """Check that each parameter comes from plain copies of the checkpoint's weights, except padded vocabulary rows.

    Args:
        vocabulary: the class of layers that may have more rows than the checkpoint.

    Raises:
        CannotShare: the error names the parameter or the weight.
    """
    what = ""
    if recorder.unknown:
        what = f"something of shape {recorder.unknown[0]} is not a plain copy of a weight of the checkpoint"
    elif recorder.spoiled or recorder.changed:
        what = "the model computes with other values than the checkpoint's"
    if what:
        raise CannotShare(f"--weight-sync single-copy: {what}; use --weight-sync shm")
    for name, parts in recorder.slices.items():
        for part in parts:
            if not torch.equal(part.view, part.held(recorder.sources[name])):
                raise CannotShare(f"{name} is not what the engine holds after it was loaded: it is transformed")
    covered: dict[int, int] = {}
    starts = [(part.view.data_ptr(), part.view.numel()) for parts in recorder.slices.values() for part in parts]
    for path, layer in model.named_modules():
        for name, p in layer.named_parameters(recurse=False):
            begin, stop = p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()
            covered[begin] = sum(n for at, n in starts if begin <= at < stop)
            padded = isinstance(layer, vocabulary) and covered[begin] > 0
            if covered[begin] != p.numel() and not padded:
                what = f"{covered[begin]} of {p.numel()} elements of {path}.{name} come from the checkpoint"
                raise CannotShare(f"--weight-sync single-copy: {what}; use --weight-sync shm")


class Sample:
    """About `LENGTH` elements of each slice, spread over it.

    They are gathered on the device of the slices, without extra copies, and come to the host at once.
    """

    def __init__(self, slices: Mapping[str, Sequence[Slice]]):
        chosen = [(name, few(part.view)) for name, parts in slices.items() for part in parts]
        self._places: dict[str, list[slice]] = {}  # of the bytes of a name
        end = 0
        for name, view in chosen:
            end = -(-end // 8) * 8  # a tensor of any dtype may begin there
            self._places.setdefault(name, []).append(slice(end, end := end + view.nbytes))
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=chosen[0][1].device)
        places = [place for parts in self._places.values() for place in parts]
        self._views = [view for _, view in chosen]
        self._copies = [
            self._bytes[place].view(view.dtype).view(view.shape)
            for place, view in zip(places, self._views, strict=True)
        ]

    @torch.no_grad()
    def digests(self) -> dict[str, str]:
        torch._foreach_copy_(self._copies, self._views)
        data, digests = memoryview(self._bytes.cpu().numpy()), {}
        for name, places in self._places.items():
            digests[name] = xxhash.xxh3_128_hexdigest(b"".join(data[place] for place in places))
        return digests


def few(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements in the sample."""
    return tensor.detach()[tuple(slice(None, None, step) for step in steps(tensor.shape))]


def steps(shape: Sequence[int]) -> list[int]:
    """Return the distance between two elements of the sample, by dimension."""
    each = max(1, round(LENGTH ** (1 / max(1, len(shape)))))
    return [-(-size // each) or 1 for size in shape]


def write_manifest(
    folder: Path,
    rank: int,
    about: Mapping[str, Any],
    memories: Sequence[Memory],
    slices: Mapping[str, list[Slice]],
    shapes: Mapping[str, Iterable[int]],
    meet: Callable[[], object],
) -> str:
    """Write `memory-RANK.json` as a whole. Return its nonce, by which a trainer recognizes an engine's new memory.

    Rank 0's comes last, because a trainer opens the others if the process of rank 0's file lives. Files of an engine
    that has ended may still exist.

    Args:
        meet: returns when all ranks of the engine have called it.
    """
    nonce = secrets.token_hex(8)
    tensors = {
        name: {
            "shape": list(shapes[name]),
            "dtype": str(parts[0].view.dtype).removeprefix("torch."),
            "slices": [part.record(memories) for part in parts],
        }
        for name, parts in slices.items()
    }
    own = {"rank": rank, "nonce": nonce, "memories": [m.record for m in memories], "tensors": tensors}
    own["process"] = process_mark(os.getpid())
    if rank == 0:
        meet()
    write_private(folder / f"memory-{rank}.json", json.dumps({**about, **own}))
    if rank != 0:
        meet()
    return nonce


def write_private(path: Path, text: str) -> None:
    """Write a file that only its user can read, as a whole."""
    hidden = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    hidden.rename(path)

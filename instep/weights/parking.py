"""Tensors that free their GPU memory for a while, in place: their storages are copied to the host and emptied.

No tensor object changes. So views, tied weights, the shards of FSDP2, the flat buffers of Megatron and the lists of an
optimizer are all valid again when the bytes are back.

    leave    copies to the host begin, on a separate stream; the tensors may still be read
    free     the copies have ended, the storages are emptied, and the caching allocator's memory goes back to the GPU
    bring    the storages get memory again, and copies from the host begin
    ready    later computations wait for these copies

The host memory is pinned, and kept for the next time, because pinning takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from instep.errors import TrainingError

ALIGNMENT = 512  # bytes, of each storage in the pool
BLOCK_BYTES = 256 << 20  # allocated at a time for copies
RESERVE_BYTES = 2 << 30  # of the host's memory, which pinning must leave free


@dataclass
class _Place:
    """A storage that is away, or about to leave: its size in bytes, and its bytes on the host; without them: zeros."""

    storage: torch.UntypedStorage
    size: int
    host: Tensor | None


class Parking:
    """The host memory of some tensors of one device.

    Args:
        find: returns the tensors that leave; called each time, because an optimizer may have new ones.
        drop: returns tensors whose contents are dropped; they come back as zeros.
    """

    def __init__(
        self, device: torch.device, find: Callable[[], Iterable[Tensor]], drop: Callable[[], Iterable[Tensor]] = tuple
    ):
        self._device, self._find, self._drop = device, find, drop
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._places: list[_Place] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving = False
        self.is_away = False

    @property
    def num_bytes(self) -> int:
        """The bytes of host memory in use."""
        return self._pool.numel()

    def leave(self) -> None:
        """Empty the dropped tensors, and begin to copy the rest to the host. Do nothing if that is already done."""
        if self._places:
            return
        self.ready()
        dropped = {s._cdata: s for s in _storages(self._drop())}
        kept = [s for s in _storages(self._find()) if s._cdata not in dropped]
        hosts = self._make_room([s.nbytes() for s in kept])
        self._places = [_Place(s, s.nbytes(), None) for s in dropped.values()]
        for storage in dropped.values():
            storage.resize_(0)
        if dropped:
            give_back(self._device)
        with self._beside():
            for storage, host in zip(kept, hosts, strict=True):
                self._places.append(_Place(storage, storage.nbytes(), host))
                host.copy_(_bytes(storage), non_blocking=True)

    def free(self) -> None:
        """Finish what `leave` began. The caller gives the memory back to the GPU (`give_back`)."""
        self.leave()
        if self.is_away:
            return
        self._wait_for_leaving()
        for place in self._places:
            place.storage.resize_(0)
        self.is_away = True

    @torch.no_grad()
    def bring(self) -> None:
        """Undo `leave` or `free`. Call `ready` before the tensors are used."""
        if not self._places:
            return
        self._wait_for_leaving()
        for place in self._places:
            if place.storage.nbytes() != place.size:
                place.storage.resize_(place.size)
        with self._beside():
            for place in self._places:
                target = _bytes(place.storage)
                if place.host is None:
                    target.zero_()
                elif self.is_away:
                    target.copy_(place.host, non_blocking=True)
        self._places, self.is_away, self._arriving = [], False, True

    def ready(self) -> None:
        """Let this thread's stream wait for the copies of `bring`."""
        if self._arriving and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._arriving = False

    def _beside(self) -> AbstractContextManager[object]:
        """Run copies on the side stream, after all earlier work; on a CPU they are made at once."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait_for_leaving(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _make_room(self, sizes: list[int]) -> list[Tensor]:
        """Return host memory for storages of these sizes, in one pool. The last pool is used again if it fits."""
        ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        total = ends[-1] if ends else 0
        if total > self._pool.numel():
            self._pool = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._pool = host_memory(total, self._device, "--offload-train", "--no-offload-train")
        return [self._pool[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


class HostCopies:
    """Copies of tensors of one device in host memory. The memory is kept for the next copies.

    Args:
        flag: the feature that needs them; without: how to continue without them. Both are for errors.
    """

    def __init__(self, device: torch.device, flag: str, without: str):
        self._device, self._flag, self._without = device, flag, without
        self._blocks: list[Tensor] = []
        self._block, self._used = 0, 0  # where there is room

    def clear(self) -> None:
        """Give the memory of all copies to the next ones."""
        self._block = self._used = 0

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy `tensor`, with its strides, after all earlier work of this thread's stream."""
        like = torch.empty_like(tensor, device="meta")
        room = self._room(tensor.numel() * tensor.element_size())
        return room.view(tensor.dtype).as_strided(like.shape, like.stride()).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Finish the copies that were begun. From now on their sources may change."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _room(self, size: int) -> Tensor:
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._used + size <= len(block):
                begin, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
                return block[begin : begin + size]
            self._block, self._used = self._block + 1, 0
        self._blocks.append(host_memory(max(size, BLOCK_BYTES), self._device, self._flag, self._without))
        return self._room(size)


def host_memory(size: int, device: torch.device, flag: str, without: str) -> Tensor:
    """Return `size` bytes of host memory, pinned for a GPU until their tensor and its views are gone.

    They have separate pages: CUDA pins no page twice, and malloc gives several tensors the same one. torch's own pinned
    memory would be rounded up to a power of 2.

    Raises:
        TrainingError: the host has too little memory left, or CUDA cannot pin it.
    """
    cuda, free = device.type == "cuda", psutil.virtual_memory().available
    if cuda and size + RESERVE_BYTES > free:
        raise TrainingError(
            f"{size / 1e9:.1f} GB of weights or optimizer states must be stored on the host, which has "
            f"{free / 1e9:.1f} GB left",
            where=flag,
            remedy=f"use {without}, more GPUs, or a host with more memory",
        )
    if not cuda:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()  # all threads touch it; CUDA would use one
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(memory.data_ptr(), size, 1)):
        what = f"CUDA cannot pin {size / 1e9:.1f} GB of host memory (error {code})"
        raise TrainingError(what, where=flag, remedy=f"raise the memory of the container, or use {without}")
    weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False  # the process' end frees it
    return memory


def give_back(device: torch.device) -> None:
    """Return the caching allocator's unused memory to the GPU, for other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # about 32 MB per thread
        torch.cuda.empty_cache()


def local_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of `module` as this rank holds them: its shards of sharded ones."""
    return [shard(t) for t in (*module.parameters(), *module.buffers())]


def shard(tensor: Tensor) -> Tensor:
    """Return the part of this rank, without gradients: hundreds of `to_local` take longer than a write."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of these tensors, each once, in order. Storages with shared memory (numpy, a file) stay."""
    found = {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}
    return [storage for storage in found.values() if storage.nbytes() and storage.resizable()]

"""The engines' shared weight memory, as the trainer maps it. The way `single-copy` writes into it.

Each worker of an engine has a manifest, `memory-RANK.json`, in its own folder or the run's. It says how to open its
memory, and which slices of it hold each weight, under its Hugging Face name. A rank of TP has a slice of a weight.
Fused weights of the engine (q, k and v; gate and up) are several weights, each a slice.

On a CPU a memory is a file that all map. On a GPU it has the CUDA IPC handle of a parameter. A rank of the trainer
opens it only if it is on that GPU; it must not write into the memory of another GPU.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from instep.errors import SyncError
from instep.system import locks
from instep.weights.spec import TensorSpec
from instep_engine.checksums import raw_bytes
from instep_engine.manifest import digest, dtype_name
from instep_engine.mapped import open_memory
from instep_engine.memory import Slice, few, steps
from instep_engine.place import SYNC, NoPlace, check_memory_folder, lives

SAMPLE_KIND = "xxh3-128 of a sample"
PART = 1 << 25  # elements per comparison
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
AGAIN = "start engine and trainer from one --hf-checkpoint and in one dtype, or use --weight-sync shm"


class EngineMemory:
    """The weights of all engines that share them here, as far as this process may write them.

    Args:
        workers: the manifest of each worker of each engine, with the `engine` and the `place` of the manifest.
        locks: file descriptors that keep other trainers away until they are closed.

    Attributes:
        nonces: of all workers. A nonce distinguishes a worker's memory from that of a restarted one.
        slices: by nonce and name, of the workers whose memory is open.
        on_gpus: whether the memory is on GPUs. Then each rank of the trainer writes that of its own.
        crowded: whether a process may open the memory of several workers.
        written_at: when `wait` first returned since this was None, by `time.monotonic`.
    """

    def __init__(self, workers: Sequence[Mapping[str, Any]], locks: Sequence[int] = ()):
        self.homes: dict[str, str] = {}
        self.written_at: float | None = None
        self._locks, self._workers = list(locks), workers
        self._engines: dict[str, tuple[str, dict[str, Any]]] = {}  # by name: its description and place, and its tensors
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.slices: dict[str, dict[str, list[Slice]]] = {}
        for worker in workers:
            with _explained(worker["engine"], worker["place"]):
                self._open(worker)
        self.nonces = list(self.homes)
        self.crowded = len({_gpu(worker) for worker in workers}) < len(workers)
        self.on_gpus = any(memory["kind"] == "cuda" for worker in workers for memory in worker["memories"])

    def _open(self, worker: Mapping[str, Any]) -> None:
        gpu = f" on GPU {_gpu(worker)}" if _gpu(worker) else ""
        self.homes[worker["nonce"]] = f"rank {worker['rank']} of {worker['engine']}{gpu}"
        where = f"the memory of {worker['engine']} ({worker['architecture']}, {worker['dtype']}), {worker['place']}"
        _, tensors = self._engines.setdefault(worker["engine"], (where, {}))
        tensors |= worker["tensors"]
        self.shapes |= {name: tuple(t["shape"]) for name, t in worker["tensors"].items()}
        self.dtypes |= {name: str(t["dtype"]) for name, t in worker["tensors"].items()}
        if not all(_reachable(memory) for memory in worker["memories"]):
            return
        memories = [open_memory(memory, torch.device("cuda")) for memory in worker["memories"]]
        slices = self.slices[worker["nonce"]] = {}
        for name, tensor in worker["tensors"].items():
            dtype = getattr(torch, tensor["dtype"])
            slices[name] = [_slice(record, memories[record["memory"]], dtype, name) for record in tensor["slices"]]

    def close(self) -> None:
        """Let another trainer attach."""
        while self._locks:
            locks.close(self._locks.pop())

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raise SyncError unless each engine has exactly the weights of the trainer; it names engine and tensor."""
        ours = {spec.name: spec for spec in specs}
        for engine, (where, theirs) in self._engines.items():
            if what := _difference(ours, theirs, engine):
                raise SyncError(what, where=where, remedy=AGAIN)

    def whole(self, name: str) -> torch.Tensor | None:
        """Return the view of a weight that is one piece in the only open memory; None for any other weight."""
        return self.box(name, self.shapes[name], (0,) * len(self.shapes[name])) if len(self.slices) == 1 else None

    def box(self, name: str, shape: Sequence[int], offset: Sequence[int], index: int = 0) -> torch.Tensor | None:
        """Return the view of a box of a weight, if it is one piece in the memory of open worker `index`; else None.

        Slices with consecutive rows are one piece: Phi-3's fused q, k and v are loaded one by one.

        Args:
            shape, offset: the elements `[offset[0] : offset[0] + shape[0], ...]` of the weight.
        """
        whole = self.shapes[name]
        stride = tuple(math.prod(whole[dim + 1 :]) for dim in range(len(whole)))  # of a contiguous tensor
        parts = sorted(list(self.slices.values())[index].get(name, ()), key=lambda part: part.source_offset)
        start, rows = sum(at * step for at, step in zip(offset, stride, strict=True)), 0
        parts = [part for part in parts if part.view.numel()]
        for part in parts:
            first = parts[0].view
            alike = part.view.shape[1:] == torch.Size(shape[1:]) and part.view.stride() == first.stride()
            steps = zip(part.view.shape, part.source_stride, stride, strict=True)
            in_order = part.view.is_contiguous() and all(size == 1 or ours == step for size, ours, step in steps)
            at = rows * stride[0] if stride else 0
            here = first.data_ptr() + rows * (first.stride(0) if stride else 0) * first.element_size()
            if not (alike and in_order) or part.source_offset != start + at or part.view.data_ptr() != here:
                return None
            rows += part.view.shape[0] if stride else 1
        if not parts or rows != (shape[0] if stride else 1):
            return None
        return parts[0].view.as_strided(tuple(shape), parts[0].view.stride())

    @torch.no_grad()
    def write(self, name: str, whole: torch.Tensor, without: int | None = None) -> None:
        """Write a weight into all of its open slices, except those of open worker `without`."""
        whole = whole.detach().contiguous()
        for index, worker in enumerate(self.slices.values()):
            for part in worker.get(name, ()) if index != without else ():
                part.view.copy_(part.of(whole))

    def unlike(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return whether one of its open slices differs from this weight in any bit; 0-dim bool."""
        whole = whole.detach().contiguous()
        parts = [part for worker in self.slices.values() for part in worker.get(name, ())]
        found = [unlike(part.view, part.of(whole)) for part in parts]
        return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=whole.device)

    def digest(self, name: str, whole: torch.Tensor) -> str:
        """Return the entries of `digests` for a weight if the workers hold `whole`, one worker after another."""
        flat, places = whole.detach().reshape(-1), self.places(name)
        samples = {nonce: raw_bytes(flat[at.to(flat.device)]) for nonce, at in places.items()}
        return "".join(digests_of(samples).values())

    def samples(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return by the nonce of each open worker the sample bytes of this weight, if it holds `whole`."""
        whole = whole.detach().contiguous()
        parts = {nonce: worker[name] for nonce, worker in self.slices.items() if name in worker}
        return {nonce: torch.cat([_few(part.of(whole)) for part in found]) for nonce, found in parts.items()}

    def places(self, name: str) -> dict[str, torch.Tensor]:
        """Return by the nonce of each worker, open or not, the elements of the flat weight in its sample, int64."""
        found = {}
        for nonce, worker in zip(self.nonces, self._workers, strict=True):
            if name in worker["tensors"]:
                slices = worker["tensors"][name]["slices"]
                parts = [_places_of(s["shape"], s["source_stride"], s["source_offset"]) for s in slices]
                found[nonce] = torch.cat(parts)
        return found

    def wait(self) -> None:
        """Return when everything is written."""
        if self.on_gpus and self.slices:
            torch.cuda.synchronize()
        self.written_at = self.written_at or time.monotonic()


def _difference(ours: Mapping[str, TensorSpec], theirs: Mapping[str, Any], engine: str) -> str:
    """Return the first difference of the trainer's weights and an engine's manifests; "" without one."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        has, lacks = ("the trainer", engine) if name in ours else (engine, "the trainer")
        return f"{has} has {name}, {lacks} has not"
    for name, spec in ours.items():
        if spec.shape != (shape := tuple(theirs[name]["shape"])):
            return f"{name} is {spec.shape} in the trainer and {shape} in {engine}"
        if (dtype := dtype_name(spec.dtype)) != theirs[name]["dtype"]:
            return f"{name} is {dtype} in the trainer and {theirs[name]['dtype']} in {engine}"
    return ""


def attach(folder: Path, *, lock: bool) -> EngineMemory:
    """Open the memory of the engines that share their weights in `folder`.

    Args:
        lock: keep other trainers away from it while this process lives, or until `EngineMemory.close`.

    Raises:
        SyncError: no engine shares its weights, the memory cannot be opened, or another trainer is attached to it.
    """
    locks: list[int] = []
    try:
        return EngineMemory(_workers(folder, locks if lock else None), locks)
    except SyncError:
        for fd in locks:
            os.close(fd)
        raise


def nonces_in(folder: Path) -> list[str]:
    """Return the nonces of all memory that `attach` would open, without opening it. Raises SyncError as it does."""
    return [worker["nonce"] for worker in _workers(folder, None)]


def _workers(folder: Path, locks: list[int] | None) -> list[dict[str, Any]]:
    """Return the manifests of the workers of all live engines; `locks` gets the lock of each engine."""
    workers, ended = list[dict[str, Any]](), list[tuple[str, str]]()
    for place in _places(folder):
        number = place.name.removeprefix(SYNC) if place != folder else 0  # a run numbers its own; an external one is 0
        about = {"engine": f"engine {number}", "place": str(place)}
        with _explained(**about):
            check_memory_folder(str(place))
            first = json.loads((place / "memory-0.json").read_text())
            if not lives(first["process"]):  # it is restarting, or was killed and left its files
                ended.append((about["engine"], str(place)))
                continue
            if locks is not None:  # a restarted engine has a new file
                locks.append(_lock(place / "memory-0.json", about["engine"]))
            others = [json.loads((place / f"memory-{i}.json").read_text()) for i in range(1, first["num_ranks"])]
            workers += [{**worker, **about, "nonce": str(worker["nonce"])} for worker in (first, *others)]
    if not workers:
        with _explained(*ended[0]):
            raise ValueError("the engine that shared it has ended")
    return workers


@contextmanager
def _explained(engine: str, place: str) -> Iterator[None]:
    """Report in a SyncError what is wrong with the memory of an engine."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, NoPlace) as error:
        raise SyncError(
            f"the memory in which {engine} shares its weights cannot be opened: {error!r}",
            where=place,
            remedy="see the engine's log; --weight-sync shm needs no such memory",
        ) from error


def _places(folder: Path) -> list[Path]:
    """Return the folder of each engine: `folder` itself, or those in it."""
    return sorted(path.parent for path in folder.glob(f"{SYNC}*/memory-0.json")) or [folder]


def marks(folder: Path) -> list[tuple[str, int, int]]:
    """Return what distinguishes the manifests in `folder` from those of restarted engines; nothing is opened."""
    found = []
    for place in _places(folder):
        for path in sorted(place.glob("memory-*.json")):
            stat = path.stat()
            found.append((str(path), stat.st_ino, stat.st_mtime_ns))
    return found


def unlike(held: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return whether `held` differs from `wanted` in any bit, in its dtype; 0-dim bool. Parts save memory."""
    held, wanted = torch.atleast_1d(held.detach()), torch.atleast_1d(wanted.detach())
    rows, bits = max(1, PART * len(held) // max(1, held.numel())), BITS[held.dtype.itemsize]
    parts = zip(held.split(rows), wanted.split(rows), strict=True)
    return torch.stack([(a.view(bits) != b.to(a.dtype).view(bits)).any() for a, b in parts]).any()


def sample_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a sample of a whole weight."""
    return sample_digests({"": [tensor]})[""]


def sample_digests(tensors: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, str]:
    """Return by name the digest of a sample of each tensor (`instep_engine.memory.Sample`); one copy to the host."""
    return digests_of({name: torch.cat([_few(tensor) for tensor in found]) for name, found in tensors.items()})


def digests_of(samples: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return by name the digest of the bytes of a sample; one copy to the host."""
    if not samples:
        return {}
    data, at, digests = memoryview(torch.cat([*samples.values()]).cpu().numpy()), 0, {}
    for name, sample in samples.items():
        digests[name] = digest(data[at : at + sample.numel()])
        at += sample.numel()
    return digests


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements in the sample."""
    return raw_bytes(few(tensor))


def _places_of(shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return the places of the elements that `_few` takes of such a view, int64, in its order."""
    places = torch.tensor(offset)
    for size, step, by in zip(shape, steps(shape), stride, strict=True):
        places = places[..., None] + torch.arange(0, size, step) * by
    return places.reshape(-1)


def _slice(record: Mapping[str, Any], memory: torch.Tensor, dtype: torch.dtype, name: str) -> Slice:
    shape, stride, offset = record["shape"], record["stride"], record["offset"]
    length = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if not 0 <= offset <= offset + length * dtype.itemsize <= memory.numel():
        raise ValueError(f"{name} is outside the memory of {memory.numel()} bytes")
    flat = memory[offset : offset + length * dtype.itemsize].view(dtype)
    return Slice(flat.as_strided(shape, stride), record["source_offset"], tuple(record["source_stride"]))


def _lock(path: Path, engine: str) -> int:
    """Return a file descriptor that holds the lock of `path`, a file of `engine`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        locks.lock(fd)
    except OSError as error:
        locks.close(fd)
        raise SyncError(
            f"another trainer is attached to the weights of {engine}",
            where=str(path),
            remedy="end it first: two trainers cannot write into one memory",
        ) from error
    return fd


def _gpu(worker: Mapping[str, Any]) -> str:
    """Return the UUID of a worker's GPU; "" on a CPU."""
    return next((str(memory["uuid"]) for memory in worker["memories"] if memory["kind"] == "cuda"), "")


def _reachable(memory: Mapping[str, Any]) -> bool:
    """Return whether this process may open a memory. A GPU has a number per process, but one UUID in all of them."""
    if memory["kind"] != "cuda":
        return True
    return torch.cuda.is_available() and str(torch.cuda.get_device_properties("cuda").uuid) == memory["uuid"]

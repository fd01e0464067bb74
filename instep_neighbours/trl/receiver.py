"""The process that joins a trainer's weight group and receives its tensors into shared memory.

The group is that of vLLM's clients (also TRL's): a TCP store, an id that rank 0 broadcasts over it, and a communicator
of NCCL between GPUs. On a CPU it is gloo over the same store. This process is one rank, for any number of engine
workers. So it can be ended if a trainer dies during a broadcast.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import pickle
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instep.checkpoints.safe_pickle import Made, NoData, read
from instep.cluster.worker_main import answer, leave
from instep.errors import SyncError
from instep_engine.gloo import make_devices, shut
from instep_engine.manifest import digest, tensor_bytes

PACKED_BYTES = 1 << 30  # vLLM's `packed_buffer_size_bytes`
GLOO = "instep-gloo"  # prefix of the keys of gloo's own rendezvous in the store
_CHUNK = 1 << 22  # elements per check for NaN


@dataclass(frozen=True)
class Meeting:
    """The store of a group of two: this process, and the trainer.

    Attributes:
        host, port: of the store.
        rank: of this process; rank 0 masters the store. The trainer is the other one.
        device: "cpu" (gloo) or "cuda" (NCCL).
        seconds: how long this process waits for the trainer, here and in every broadcast.
    """

    host: str
    port: int
    rank: int
    device: str
    seconds: float

    @property
    def trainer(self) -> int:
        return 1 - self.rank


class WrongTensor(Exception):
    """A trainer announced a tensor that does not belong to this update; the message says what to do."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a slot, and its form in the engines.

    `first` is its first element in the trainer's tensor, which may hold several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    number: int  # of the slot's file
    offset: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Announced:
    """A tensor as the trainer announces it.

    Attributes:
        served: its dtype in the engines.
        places: where its parts go; empty: it is received and checked, but not kept.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    served: str
    places: tuple[Place, ...] = ()

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of "bfloat16" or "torch.bfloat16". Raises WrongTensor for anything else."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WrongTensor(f"{name!r} is not a torch dtype")
    return dtype


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtype_of(dtype).itemsize


class Receiver:
    """What the server calls in this process."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._group: _NcclGroup | _GlooGroup | None = None
        self._files: dict[Path, torch.Tensor] = {}

    def join(self, meeting: Meeting) -> None:
        """Join the trainer's group. Raises SyncError."""
        try:
            store, doors = _store(meeting)
            self._store = store
            self._group = _NcclGroup(store, meeting) if meeting.device == "cuda" else _GlooGroup(store, meeting)
            shut(doors)
        except (OSError, RuntimeError, ImportError) as error:  # torch's DistError is one; NCCL needs vLLM
            raise SyncError(
                f"no weight group with the trainer: {_first_line(error)}",
                where=f"{meeting.host}:{meeting.port}",
                remedy="see the trainer's own output; is the port open between both hosts?",
            ) from error

    def alive(self) -> bool:
        """Return whether the group's store answers; if the trainer owns it and it is silent, the trainer has left."""
        try:
            return self._store is not None and self._store.num_keys() >= 0
        except (OSError, RuntimeError):
            return False

    def receive(
        self, what: Sequence[Announced], slot: Sequence[Path], packed_bytes: int | None, barrier: bool
    ) -> list[tuple[list[str], bool]]:
        """Receive tensors, cast each to its place's dtype and write it there.

        Args:
            slot: its files.
            packed_bytes: tensors come in buffers, which end with the tensor that exceeds this size; None: each comes
                separately.

        Returns:
            For each tensor the digests of its parts as they are served, and whether it is finite in that dtype.

        Raises:
            SyncError: the trainer did not send them.
        """
        assert self._group is not None, "the group is joined first"
        found: list[tuple[list[str], bool]] = []
        try:
            for part in cuts(what, packed_bytes):
                buffer = torch.empty(sum(one.nbytes for one in part), dtype=torch.uint8, device=self._group.device)
                if buffer.numel():
                    self._group.broadcast(buffer)
                if barrier:
                    self._group.barrier()
                pieces = buffer.split([one.nbytes for one in part])
                found += [self._take(one, slot, piece) for one, piece in zip(part, pieces, strict=True)]
        except (OSError, RuntimeError) as error:
            raise SyncError(
                f"the trainer did not send {what[len(found)].name if len(found) < len(what) else 'all'}: "
                f"{_first_line(error)}",
                where="the weight group",
                remedy="see the trainer's own output",
            ) from error
        return found

    def _take(self, what: Announced, slot: Sequence[Path], data: torch.Tensor) -> tuple[list[str], bool]:
        dtype = dtype_of(what.dtype)
        data = data.clone() if data.storage_offset() % dtype.itemsize else data
        served = data.view(dtype).view(what.shape).to(dtype_of(what.served))
        finite = all(bool(torch.isfinite(part).all()) for part in served.reshape(-1).split(_CHUNK))
        data = served.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digests = []
        for place in what.places:
            part = data[place.first * served.itemsize :][: place.nbytes]
            self._file(slot[place.number])[place.offset : place.offset + place.nbytes].copy_(part)
            digests.append(digest(tensor_bytes(part)))
        return digests or [digest(tensor_bytes(data))], finite

    def _file(self, path: Path) -> torch.Tensor:
        if path not in self._files:
            with open(path, "r+b") as file:
                self._files[path] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._files[path]


def cuts(what: Sequence[Announced], packed_bytes: int | None) -> list[list[Announced]]:
    """Yield the tensors of each broadcast, cut as vLLM senders do: a buffer ends with the tensor above the limit."""
    if packed_bytes is None:
        return [[one] for one in what]
    out: list[list[Announced]] = []
    size = packed_bytes + 1
    for one in what:
        if size > packed_bytes:
            out.append([])
            size = 0
        out[-1].append(one)
        size += one.nbytes
    return out


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


def _store(meeting: Meeting) -> tuple[dist.Store, set[int]]:
    """Return the store of the group, and the listeners that it needs until both processes have joined."""
    timeout = timedelta(seconds=meeting.seconds)
    if meeting.rank == 0:
        listener = socket.create_server((meeting.host, meeting.port))
        # libuv's store continues without descriptors, the other one ends the process.
        options: Any = {"master_listen_fd": (door := listener.detach()), "use_libuv": True, "wait_for_workers": False}
        return dist.TCPStore(meeting.host, meeting.port, is_master=True, timeout=timeout, **options), {door}
    # A trainer with the store waits until both have counted themselves: `wait_for_workers`, which does only that.
    return dist.TCPStore(meeting.host, meeting.port, 2, is_master=False, timeout=timeout), set()


class _GlooGroup:
    def __init__(self, store: dist.Store, meeting: Meeting):
        self.device, self._store, self._meeting, self._num_sent = torch.device("cpu"), store, meeting, 0
        if meeting.rank == 0:
            self._send(b"gloo")  # between GPUs, NCCL's id comes first
        else:
            store.wait(["broadcast_from/0/0"])
        options = dist.ProcessGroupGloo._Options()
        local = meeting.host if meeting.rank == 0 else _address_to(meeting)
        options._devices, doors = make_devices(hostname=local)
        options._timeout = timedelta(seconds=meeting.seconds)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(GLOO, store), meeting.rank, 2, options)
        self._group.allreduce([torch.zeros(1)]).wait()
        shut(doors)

    def _send(self, value: object) -> str:
        key = f"broadcast_from/0/{self._num_sent}"
        self._num_sent += 1
        self._store.set(key, pickle.dumps(value))
        return key

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8 and contiguous, with what the trainer broadcasts."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._meeting.trainer, 0
        self._group.broadcast([buffer], options).wait()

    def barrier(self) -> None:
        """Run vLLM's barrier as rank 0: it names the barrier, and leaves last."""
        assert self._meeting.rank == 0
        name = f"barrier_{uuid.uuid4()}"
        keys = [self._send(name)]
        for step in ("arrival", "departure"):
            own, theirs = (f"{step}_{name}_{rank}" for rank in (0, 1))
            self._store.set(own, b"1")
            self._store.wait([theirs], timedelta(seconds=self._meeting.seconds))
            keys += [own, theirs]
        for key in keys:
            self._store.delete_key(key)


class _NcclGroup:
    """Uses vLLM's own communicator, which is installed where engines run on GPUs."""

    def __init__(self, store: dist.Store, meeting: Meeting):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self._meeting, self.device = meeting, torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._store = careful_group(store, meeting.rank)
        self._comm = PyNcclCommunicator(self._store, device=self.device)
        if self._comm.disabled:
            raise RuntimeError("vLLM's communicator found no NCCL; see receiver-rank0.log")

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._comm.broadcast(buffer, src=self._meeting.trainer)
        torch.cuda.current_stream().synchronize()

    def barrier(self) -> None:
        self._store.barrier(timeout=self._meeting.seconds)


def careful_group(store: dist.Store, rank: int) -> Any:
    """Return vLLM's group of two over a store. Any process may write to the store, so only an id or a name is read."""
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    class Careful(StatelessProcessGroup):
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            if self.rank == src:
                return super().broadcast_obj(obj, src)
            key = f"broadcast_from/{src}/{self.broadcast_recv_src_counter[src]}"
            self.broadcast_recv_src_counter[src] += 1
            return _id_or_text(self.store.get(key), ncclUniqueId)

    return Careful(rank=rank, world_size=2, store=store)


def _id_or_text(data: bytes, kind: type[ctypes.Structure]) -> Any:
    """Return what vLLM has pickled: an `ncclUniqueId` (`kind`), a text or bytes. Raises RuntimeError otherwise."""
    try:
        value = read(data)
        if isinstance(value, (str, bytes)):
            return value
        if not isinstance(value, Made) or value.of != "_ctypes._unpickle":
            raise NoData("it is of another kind")
        of, (attributes, content) = value.args
        if of.of != f"{kind.__module__}.{kind.__qualname__}" or attributes or len(content) != ctypes.sizeof(kind):
            raise NoData("it is another id")
        return kind.from_buffer_copy(content)
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(f"the group's store holds something else where NCCL's id should be: {error}") from error


def _address_to(meeting: Meeting) -> str:
    """Return our own address on the route to the trainer."""
    with socket.create_connection((meeting.host, meeting.port), timeout=meeting.seconds) as sock:
        return str(sock.getsockname()[0])


if __name__ == "__main__":
    leave(answer(lambda event: Receiver()))

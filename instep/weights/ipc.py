"""The way `ipc`: trainer and engines are on the same GPUs, and weights travel through buckets that both have open.

Each rank of the trainer that shares its GPU with an engine's worker has two buckets there (`handles.py`). Rank 0
gathers one tensor after another, packs them, and computes the checksums on the GPU. It sends full buckets to the other
ranks, GPU to GPU. While the engine checks and loads one bucket, the next is filled. Buckets and lines stay open for the
next session, while the same processes take part. On a CPU the buckets are files in shared memory.

The engines pause when both buckets are full, not before; for an adapter they pause when it has arrived (`lora_ipc.py`).
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import SyncError
from instep.weights.nccl import Broken, Delivered, Event, Nccl, plan, put
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Order, expandable
from instep_engine.checksums import checksums, rows_of
from instep_engine.handles import KIND, LOOK_SECONDS, Bucket, Line, device_key, listen, synchronize
from instep_engine.manifest import TensorRecord
from instep_engine.stream import Invitation, StreamBroken, bytes_of

NUM_BUCKETS = 2


@dataclass
class _Open:
    """The lines of this rank. Later sessions of the same audience use them, too."""

    audience: str
    invitation: Invitation
    num_bytes: int  # of a bucket
    lines: list[Line] = field(default_factory=list)


class Ipc(Nccl):
    name = "ipc"

    def __init__(self) -> None:
        super().__init__()
        self._kept: _Open | None = None
        self._buckets: list[Bucket] = []
        self.shares = False  # whether another rank serves workers, too, and needs the packed buckets of rank 0

    def _end(self, invitation: Invitation) -> None:
        _abort_file(invitation).touch()

    # ---- the worker --------------------------------------------------------------------------------------------------

    def send(self, source: WeightSource, order: Order, emit: Callable[[Event], None]) -> None:
        """Send all weights. Emit the receivers' meeting place when both buckets are full, and at the end what was sent.

        Every rank packs by the same plan, so all know when a bucket is full.

        Raises:
            SyncError: no memory for buckets that another process could open.
        """
        stream, kept = _Stream(self, source.specs, order, emit), self._kept
        same = kept is not None and (kept.audience, kept.num_bytes) == (order.audience, stream.num_bytes)
        if not all(_gathered(same and kept is not None and not _abort_file(kept.invitation).exists())):
            self.close()
        if _place()[0] == 0:
            stream.buckets  # noqa: B018 - allocate their memory before anything waits
        for _, tensor in source:
            stream.add(tensor)
        stream.end()

    def buckets(self, num_bytes: int, device: torch.device, folder: Path) -> list[Bucket]:
        """The buckets of this process; on a GPU they are allocated once."""
        if not self._buckets or self._buckets[0].data.numel() != num_bytes:
            _refuse_expandable(device)
            try:
                self._buckets = [Bucket(num_bytes, device, folder) for _ in range(NUM_BUCKETS)]
            except OSError as error:
                raise SyncError(
                    f"two buckets of {num_bytes / 1e6:,.1f} MB do not fit into shared memory: {error.strerror}",
                    where=str(folder),
                    remedy="enlarge /dev/shm (docker: --shm-size), or lower --update-weight-buffer-size",
                ) from error
        return self._buckets

    def close(self) -> None:
        """Close the lines. Waiting workers notice it."""
        for line in self._kept.lines if self._kept is not None else ():
            line.close()
        self._kept = None
        if self._buckets and self._buckets[0].data.device.type == "cpu":
            for bucket in self._buckets:
                bucket.unlink()
            self._buckets = []  # a process that joins needs a file with a name

    def lines(self, stream: _Stream) -> list[Line]:
        """Open the lines to the workers on this rank's GPU (collective). Emit the invitation.

        Raises:
            StreamBroken: not all have joined, or one is on a GPU without a rank of the trainer.
        """
        order, rank = stream.order, _place()[0]
        if self._kept is not None:
            stream.emit_first(self._kept.invitation)
            return self._kept.lines
        (name,) = _from_first([secrets.token_hex(16)])
        paths = [order.folder / f"{name}-{other}.sock" for other in range(_place()[1])]
        invitation = Invitation(f"{KIND}{paths[0]}", name, order.num_receivers + 1)
        opened = _Open(order.audience, invitation, stream.num_bytes)

        def look() -> None:
            if _abort_file(invitation).exists():
                raise StreamBroken("it was ended because another peer has failed")

        try:
            with listen(paths[rank]) as listener:
                keys = _gathered(device_key(stream.device))  # all ranks listen now
                stream.emit_first(opened.invitation)
                found: list[Any] = [""]
                if rank == 0:
                    found = [_direct(listener, keys, paths, opened, look, stream.deadline)]
                (counts,) = _from_first(found)
                self.shares = not isinstance(counts, str) and any(counts[1:])
                if isinstance(counts, str):
                    raise StreamBroken(counts)
                if rank:
                    opened.lines = [line for line, _ in _joined(listener, counts[rank], look, stream.deadline)]
        finally:
            paths[rank].unlink(missing_ok=True)
        self._kept = opened
        for line in opened.lines:
            line.send({"buckets": [bucket.handle() for bucket in stream.buckets]}, stream.deadline)
        return opened.lines


WAY = Ipc()


class _Stream:
    """The stream of one rank in one session.

    Attributes:
        deadline: by `time.monotonic`.
        num_bytes: the size of a bucket.
        emit_first: emits to the controller, on rank 0.
    """

    def __init__(self, way: Ipc, specs: list[TensorSpec], order: Order, emit: Callable[[Event], None]):
        self._way, self.order, self._emit = way, order, emit
        self._first = _place()[0] == 0
        self.deadline, self.device = time.monotonic() + order.seconds, torch.device(order.device)
        self._plan = plan(specs, order.bucket_bytes)
        self.num_bytes = max(bytes_of(bucket) for bucket in self._plan)
        self._number = self._held = 0  # of the current bucket, and its number of tensors
        self._lines: list[Line] = []
        self._broken = False
        self._full: list[tuple[list[TensorRecord], int, list[str]]] = []  # bucket, slot, checksums; not sent yet
        self._sent: list[TensorRecord] = []
        self._began, self._waited = time.monotonic(), 0.0  # and the time spent waiting for the engines

    @property
    def buckets(self) -> list[Bucket]:
        return self._way.buckets(self.num_bytes, self.device, self.order.folder)

    def emit_first(self, event: Event) -> None:
        if self._first:
            self._emit(event)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor | None) -> None:
        """Put the next tensor of the plan into its bucket. Send the bucket if it is full."""
        bucket, slot = self._plan[self._number], self._number % NUM_BUCKETS
        if self._held == 0 and self._number >= NUM_BUCKETS:
            self._guarded(lambda: self._wait_free(slot))
        if self._first:
            assert tensor is not None, "rank 0 gets full tensors"
            put(self._data[slot], bucket[self._held], tensor)
        self._held += 1
        if self._held == len(bucket):
            self._fill_ended(bucket, slot)
            self._number, self._held = self._number + 1, 0

    @functools.cached_property
    def _data(self) -> list[torch.Tensor]:
        """The bytes of the buckets. A rank without workers takes part in rank 0's broadcasts to others."""
        if self._first or self._lines:
            return [bucket.data for bucket in self.buckets]
        return [torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)] * NUM_BUCKETS

    def _fill_ended(self, bucket: list[TensorRecord], slot: int) -> None:
        """Compute the checksums of a full bucket. Nothing is sent until all slots are full."""
        sums = [""] * len(bucket)
        if self._first:
            sums = checksums(self._data[slot][: bytes_of(bucket)], [rows_of(t.nbytes) for t in bucket])
            self._sent += [replace(t, digest=sum_) for t, sum_ in zip(bucket, sums, strict=True)]
        self._full.append((bucket, slot, sums))
        ready = min(NUM_BUCKETS, len(self._plan))
        if self._number + 1 == ready:
            self._guarded(lambda: self._lines.extend(self._way.lines(self)))
        if self._number + 1 >= ready:
            for full in self._full:
                self._send(*full)
            self._full = []

    def _send(self, bucket: list[TensorRecord], slot: int, sums: list[str]) -> None:
        if self._way.shares:
            dist.broadcast(self._data[slot][: bytes_of(bucket)], 0)
            sums = _from_first(sums)
        synchronize(self.device)
        tensors = [{**vars(t), "digest": s} for t, s in zip(bucket, sums, strict=True)]
        header = {"slot": slot, "num_bytes": bytes_of(bucket), "tensors": tensors}
        session = {"version": self.order.version, "nonce": self.order.nonce}
        self._guarded(lambda: self._tell({**header, **session}))

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._lines:
            line.send(message, self.deadline)

    def _wait_free(self, slot: int) -> None:
        for line in self._lines:
            if (answer := line.receive(self.deadline)) != {"free": slot}:
                raise StreamBroken(f"a peer answered {answer}, not that bucket {slot} is free")

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step. If it fails, end the stream of this rank, but keep taking part with the other ranks."""
        if self._broken:
            return
        began = time.monotonic()
        try:
            step()
        except StreamBroken as error:
            self._broken = True
            self._way.close()
            self._emit(Broken(str(error)))
        self._waited += time.monotonic() - began

    def end(self) -> None:
        for number in range(max(0, self._number - NUM_BUCKETS), self._number):
            self._guarded(functools.partial(self._wait_free, number % NUM_BUCKETS))
        self._guarded(lambda: self._tell({"end": True}))
        if self._lines and not self._broken:
            for bucket in self.buckets:
                bucket.unlink()  # all have it open
        gathered = time.monotonic() - self._began - self._waited
        self.emit_first(Delivered(tuple(self._sent), {"gather": gathered, "send": self._waited}))


# ---- who joins -------------------------------------------------------------------------------------------------------


def _joined(
    listener: socket.socket, count: int, look: Callable[[], None], deadline: float
) -> list[tuple[Line, dict[str, Any]]]:
    """Return the lines of the next `count` workers, and what each reports about itself.

    Raises:
        StreamBroken: not all have joined. Those that have joined notice it.
    """
    lines, found = list[Line](), list[tuple[Line, dict[str, Any]]]()
    listener.settimeout(LOOK_SECONDS)
    try:
        while len(found) < count:
            try:
                lines.append(Line(listener.accept()[0], look))
                found.append((lines[-1], lines[-1].receive(deadline)))
            except TimeoutError:
                look()
                if time.monotonic() > deadline:
                    raise StreamBroken(f"{len(found)} of {count} workers of the engines have joined") from None
    except StreamBroken:
        for line in lines:
            line.close()
        raise
    return found


def _direct(
    listener: socket.socket,
    keys: list[str],
    paths: list[Path],
    opened: _Open,
    look: Callable[[], None],
    deadline: float,
) -> list[int] | str:
    """Send every worker the address of the rank on its GPU; `opened` gets the lines of rank 0.

    Args:
        keys: the device of each rank; paths: where it listens.

    Returns:
        The number of workers of each rank, or the reason why there is no stream.
    """
    counts = [0] * len(keys)
    found = list[tuple[Line, dict[str, Any]]]()
    try:
        found = _joined(listener, opened.invitation.size - 1, look, deadline)
        for line, about in found:
            if (device := about["device"]) not in keys:
                reason = f"no rank of the trainer is on a worker's GPU ({device}), which --weight-sync ipc needs"
                line.send({"refused": reason}, deadline)
                raise StreamBroken(reason)
            rank = keys.index(device)
            counts[rank] += 1
            if rank == 0:
                opened.lines.append(line)
            else:
                line.send({"elsewhere": str(paths[rank])}, deadline)
                line.close()
    except StreamBroken as error:
        for line, _ in found:
            line.close()
        return str(error)
    return counts


def _place() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(value: Any) -> list[Any]:
    """Return the value of every rank (collective)."""
    values = [value] * _place()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def _from_first(values: list[Any]) -> list[Any]:
    """Return the values of rank 0 (collective)."""
    if _place()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values


def _abort_file(invitation: Invitation) -> Path:
    """Return the file that ends the stream of an invitation."""
    return Path(invitation.store.removeprefix(KIND)).with_name(f"{invitation.group}.abort")


def _refuse_expandable(device: torch.device) -> None:
    """Raise SyncError if torch would allocate memory without CUDA IPC handles."""
    if device.type == "cuda" and (name := expandable()):
        raise SyncError(
            "a bucket in an expandable segment cannot be opened by another process",
            where=f"--weight-sync ipc with {name}={os.environ[name]}",
            remedy=f"remove expandable_segments from {name}, or use --weight-sync shm",
        )

"""The way `nccl`: weights travel as a stream of buckets over a process group of trainer and engines.

It is NCCL between GPUs and gloo between CPUs. The trainer's rank 0 gathers one tensor after another, packs them, and
broadcasts a full bucket to all workers of all engines while it fills the next, so that it holds two buckets at most.
The group outlives its session as long as the same processes take part.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from instep.errors import SyncError
from instep.weights.manifest import TensorRecord, dtype_name
from instep.weights.source import WeightSource
from instep.weights.stream import (
    ROW_BYTES,
    Group,
    Invitation,
    Packed,
    StreamBroken,
    abort,
    checksum,
    checksums,
    raw_bytes,
    rows_of,
    send_bucket,
    send_end,
)
from instep.weights.way import Carriage, Order, Sent

ABORT_SECONDS = 5.0


class Broken(NamedTuple):
    """The sender has given up its stream."""

    reason: str


Event = Invitation | TensorRecord | Broken


@dataclass
class _Open:
    """A group that later sessions of the same audience use, too."""

    audience: str
    invitation: Invitation
    store: dist.Store
    group: Group


def _store_at(host: str, timeout: timedelta) -> tuple[dist.Store, str]:
    """A store at an address of ours, and what `open_store` calls it; TCPStore itself would listen on all addresses."""
    listener = socket.create_server((host, 0))
    port, given = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(host, port, timeout=timeout, master_listen_fd=listener.detach(), **given), f"tcp:{host}:{port}"


class Nccl:
    digest_kind, digest = "multilinear-64", staticmethod(checksum)

    def __init__(self) -> None:
        self._open: _Open | None = None  # of the worker that sends

    # ---- the worker --------------------------------------------------------------------------------------------------

    def send(self, source: WeightSource, order: Order, emit: Callable[[Event], None]) -> None:
        """Send all weights; emits first where the receivers meet, and then a record of each tensor."""
        packer: _Packer | None = None
        broken = False
        for spec, tensor in source:
            if tensor is None or broken:
                continue  # the other ranks gather on
            try:
                packer = packer or _Packer(self._group(order, tensor.device, emit), order, emit)
                packer.add(spec.name, tensor)
            except StreamBroken as error:
                broken = self._give_up(error, emit)
        if packer is not None and not broken:
            try:
                packer.end()
            except StreamBroken as error:
                self._give_up(error, emit)

    def _give_up(self, error: StreamBroken, emit: Callable[[Event], None]) -> bool:
        self._close()
        emit(Broken(str(error)))
        return True

    def _group(self, order: Order, device: torch.device, emit: Callable[[Event], None]) -> Group:
        if self._open is not None and self._open.audience == order.audience:
            emit(self._open.invitation)
            return self._open.group
        self._close()
        name = secrets.token_hex(16)
        timeout = timedelta(seconds=order.seconds)
        store: dist.Store
        if order.host:
            store, place = _store_at(order.host, timeout)
        else:
            path = order.folder / f"{name}.store"
            store, place = dist.FileStore(str(path), -1), f"file:{path}"
            store.set_timeout(timeout)
        invitation = Invitation(place, name, order.num_receivers + 1)
        emit(invitation)
        group = Group(store, invitation, device, order.seconds, rank=0)
        self._open = _Open(order.audience, invitation, store, group)
        return group

    def _close(self) -> None:
        if self._open is not None:
            self._open.group.close()
            self._open = None

    # ---- the controller ----------------------------------------------------------------------------------------------

    def drive(self, carriage: Carriage) -> Sent:
        """Let the engines receive while the workers send; whoever fails ends the stream for all."""
        tensors: list[TensorRecord] = []
        loads: list[Future[None]] = []
        broken: list[str] = []
        ended = threading.Event()

        def end(invitation: Invitation) -> None:
            if not ended.is_set():
                ended.set()
                with suppress(RuntimeError, dist.DistError):  # the sender is gone, too
                    abort(invitation, ABORT_SECONDS)

        def on_event(event: Event) -> None:
            if isinstance(event, Invitation):
                info = {"backend": "nccl", "invitation": asdict(event), "seconds": carriage.seconds_left()}
                loads.append(pool.submit(carriage.deliver, info, lambda: end(event)))
            elif isinstance(event, Broken):
                broken.append(event.reason)
            else:
                tensors.append(event)

        pool = ThreadPoolExecutor(1)
        try:
            carriage.publish(carriage.memory_folder, on_event, *carriage.receivers())
            for future in loads:
                future.result(timeout=carriage.seconds_left())
        except TimeoutError:
            carriage.seconds_left()  # none are left, which this tells
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if broken:
            raise SyncError(
                f"the weights did not reach every engine: {broken[0]}",
                where="--weight-sync nccl",
                remedy="resume from the last checkpoint, and try --sync-way disk if it happens again",
            )
        return Sent(tuple(tensors), self.digest_kind)


WAY = Nccl()


class _Packer:
    """Packs tensors into buckets, and sends each that is full."""

    def __init__(self, group: Group, order: Order, emit: Callable[[Event], None]):
        self._group, self._emit = group, emit
        self._session = {"version": order.version, "nonce": order.nonce}
        self._size, self._deadline = order.bucket_bytes, time.monotonic() + order.seconds
        self._buffer: torch.Tensor | None = None
        self._held: list[Packed] = []
        self._end = 0
        self._sending: tuple[Any, torch.Tensor] | None = None  # with the bucket, which must live as long

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = raw_bytes(tensor)
        room = rows_of(data.numel()) * ROW_BYTES
        if self._buffer is None or self._end + room > self._buffer.numel():
            self._flush()
            size = max(self._size // ROW_BYTES * ROW_BYTES, room)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        place = self._buffer[self._end : self._end + room]
        place[: data.numel()].copy_(data)
        place[data.numel() :].zero_()
        self._held.append(Packed(name, tuple(tensor.shape), dtype_name(tensor.dtype), self._end, data.numel(), ""))
        self._end += room

    def end(self) -> None:
        self._flush()
        self._wait()
        send_end(self._group, self._deadline)

    def _wait(self) -> None:
        if self._sending is not None:
            self._group.finish(self._sending[0], self._deadline)
            self._sending = None

    def _flush(self) -> None:
        if self._buffer is None:
            return
        data = self._buffer[: self._end]
        sums = checksums(data, [rows_of(t.nbytes) for t in self._held])
        tensors = [Packed(**{**asdict(t), "checksum": s}) for t, s in zip(self._held, sums, strict=True)]
        for t in tensors:
            self._emit(TensorRecord(t.name, t.shape, t.dtype, t.offset, t.nbytes, t.checksum))
        self._wait()
        self._sending = (send_bucket(self._group, self._session, tensors, data, self._deadline), data)
        self._buffer, self._held, self._end = None, [], 0

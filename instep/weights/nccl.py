"""The way `nccl`: weights travel as a stream of buckets over a process group of trainer and engines.

It is NCCL between GPUs and gloo between CPUs. The trainer's rank 0 gathers one tensor after another and packs them into
buckets. It broadcasts one bucket to all workers of all engines while it fills the next, so it holds at most two. The
group outlives its session while the same processes take part.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from instep.errors import SyncError
from instep.system.run_context import RunThreads
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Carriage, Order, Sent
from instep_engine.checksums import ROW_BYTES, checksum, rows_of, sums, texts_of
from instep_engine.manifest import TensorRecord, dtype_name
from instep_engine.stream import Group, Invitation, StreamBroken, abort, new_bucket, send_bucket, send_header

ABORT_SECONDS = 5.0


class Broken(NamedTuple):
    """The sender has given up its stream."""

    reason: str


class Delivered(NamedTuple):
    """The records of all sent tensors, and the seconds of the sender.

    These count gathering and packing, waiting for the receivers to join, and waiting for buckets to be sent.
    """

    tensors: tuple[TensorRecord, ...]
    seconds: dict[str, float]


Event = Invitation | Delivered | Broken


@dataclass
class _Open:
    """A group that later sessions of the same audience use, too."""

    audience: str
    invitation: Invitation
    store: dist.Store
    group: Group


def _store_at(host: str, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store at our own address, and its `open_store` name. TCPStore itself would listen on all addresses."""
    listener = socket.create_server((host, 0))
    port, given = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(host, port, timeout=timeout, master_listen_fd=listener.detach(), **given), f"tcp:{host}:{port}"


class Nccl:
    digest_kind, digest = "multilinear-64", staticmethod(checksum)
    name = "nccl"

    def __init__(self) -> None:
        self._open: _Open | None = None  # the sending worker's

    # ---- the worker --------------------------------------------------------------------------------------------------

    def send(self, source: WeightSource, order: Order, emit: Callable[[Event], None]) -> None:
        """Send all weights. Emit first where the receivers meet, and at the end a record of each tensor."""
        packer: _Packer | None = None
        broken = False
        for spec, tensor in source:
            if tensor is None or broken:
                continue  # the other ranks keep gathering
            try:
                packer = packer or _Packer(self._group(order, tensor.device, emit), source, order)
                packer.add(spec, tensor)
                if packer.is_full:
                    emit(packer.end())
            except StreamBroken as error:
                broken = True
                self._close()
                emit(Broken(str(error)))

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
        """Let the engines receive while the workers send. Any failure ends the stream for all.

        If only the sender has noticed the end of the stream, the SyncError comes from its StreamBroken.
        """
        tensors: list[TensorRecord] = []
        seconds: dict[str, float] = {}
        loads: list[Future[None]] = []
        invited: list[Invitation] = []
        broken: list[str] = []
        ended = threading.Event()

        def end() -> None:
            if not ended.is_set():
                ended.set()
                for invitation in invited:
                    self._end(invitation)

        def deliver(info: dict[str, Any]) -> None:
            try:
                carriage.deliver(info, end)
            except BaseException:
                end()  # otherwise the sender would wait for engines that do not come
                raise

        def on_event(event: Event) -> None:
            if isinstance(event, Invitation):
                invited.append(event)
                info = {"backend": self.name, "invitation": asdict(event), "seconds": carriage.seconds_left()}
                loads.append(pool.submit(deliver, info))
            elif isinstance(event, Broken):
                broken.append(event.reason)
            else:
                tensors.extend(event.tensors)
                seconds.update(event.seconds)

        pool = RunThreads(1)
        try:
            carriage.publish(carriage.memory_folder, on_event, *carriage.receivers())
            sent = time.monotonic()
            for future in loads:
                future.result(timeout=carriage.seconds_left())
        except BaseException as error:
            end()  # otherwise the engines would wait for a sender that has gone
            if isinstance(error, TimeoutError):
                carriage.seconds_left()  # the time is over, so this raises
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if broken:
            raise SyncError(
                f"the weights did not reach every engine: {broken[0]}",
                where=f"--weight-sync {self.name}",
                remedy="resume from the last checkpoint, and try --weight-sync disk if it happens again",
            ) from StreamBroken(broken[0])
        return Sent(tuple(tensors), self.digest_kind, {**seconds, "load": time.monotonic() - sent})

    def _end(self, invitation: Invitation) -> None:
        """End the stream for all that wait in it."""
        with suppress(RuntimeError, dist.DistError):  # the sender is gone, too
            abort(invitation, ABORT_SECONDS)


WAY = Nccl()


class _Packer:
    """Packs tensors into buckets as planned, and sends each full bucket."""

    def __init__(self, group: Group, source: WeightSource, order: Order):
        self._began, self._met, self._waited = time.monotonic(), 0.0, 0.0
        self._group, self._deadline = group, time.monotonic() + order.seconds
        self._plan = plan(source.specs, order.bucket_bytes)
        self._number = self._held = 0  # of the current bucket, and its number of tensors
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()  # with the buckets, which must live as long
        self._sums: list[torch.Tensor] = []
        self._header = send_header(group, {"version": order.version, "nonce": order.nonce}, self._plan)

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        bucket = self._plan[self._number]
        if self._held == 0:
            self._finish(1)
            self._memory, self._data, self._tail = new_bucket(bucket, self._group.device)
        packed = bucket[self._held]
        came = (spec.name, tuple(tensor.shape), dtype_name(tensor.dtype))
        assert came == (packed.name, packed.shape, packed.dtype), f"{came}, where {packed} was planned"
        put(self._data, packed, tensor)
        self._held += 1
        if self._held == len(bucket):
            self._tail.copy_(sums(self._data, [rows_of(t.nbytes) for t in bucket]))
            self._sums.append(self._tail.clone())
            self._sending.append((send_bucket(self._group, self._memory), self._memory))
            self._number, self._held = self._number + 1, 0

    @property
    def is_full(self) -> bool:
        """Return whether all tensors of the plan have come."""
        return self._number == len(self._plan)

    def end(self) -> Delivered:
        digests = texts_of(torch.cat(self._sums))  # while the last bucket is under way
        tensors = [t for bucket in self._plan for t in bucket]
        records = [replace(t, digest=digest) for t, digest in zip(tensors, digests, strict=True)]
        self._finish(0)
        gather = time.monotonic() - self._began - self._met - self._waited
        return Delivered(tuple(records), {"gather": gather, "meet": self._met, "send": self._waited})

    def _finish(self, most: int) -> None:
        """Wait until at most this many buckets are under way."""
        if len(self._sending) <= most:
            return
        began = time.monotonic()
        for work, _ in self._header:
            self._group.finish(work, self._deadline)
        self._header = []
        met = time.monotonic()
        while len(self._sending) > most:
            self._group.finish(self._sending[0][0], self._deadline)
            self._sending.popleft()
        self._met += met - began
        self._waited += time.monotonic() - met


def put(data: torch.Tensor, packed: TensorRecord, tensor: torch.Tensor) -> None:
    """Write a tensor to its place in the memory of a bucket, with zeros to the end of its last row."""
    end = packed.offset + packed.nbytes
    data[packed.offset : end].view(getattr(torch, packed.dtype)).view(tensor.shape).copy_(tensor.detach())
    if (row_end := packed.offset + rows_of(packed.nbytes) * ROW_BYTES) > end:
        data[end:row_end].zero_()


def plan(specs: list[TensorSpec], bucket_bytes: int) -> list[list[TensorRecord]]:
    """Plan which tensor is where in which bucket, in the order of `specs`; one larger than `bucket_bytes` is alone."""
    buckets: list[list[TensorRecord]] = []
    end = 0
    for spec in specs:
        room = rows_of(spec.nbytes) * ROW_BYTES
        if not buckets or end + room > bucket_bytes:
            buckets.append([])
            end = 0
        buckets[-1].append(TensorRecord(spec.name, tuple(spec.shape), dtype_name(spec.dtype), end, spec.nbytes))
        end += room
    return buckets

"""A stream of weights over a process group: rank 0 sends packed buckets, the others check each and load it.

Both ends, the trainer and the engine, use this file.

First come two broadcasts, the length of a header and the header (JSON). It holds the session, and which tensors are in
each bucket. A bucket is one broadcast: its tensors, each from a multiple of ROW_BYTES on, and their checksums. So the
next broadcast can run on both ends while a bucket is packed or loaded. Only one comparison per bucket waits for the
host of a GPU. A receiver that refuses something keeps reading until the end, so that all stay in step. `abort` ends a
stream at once, for all that wait in it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep_engine.checksums import ROW_BYTES, checksums, rows_of, texts_of
from instep_engine.manifest import TensorRecord, WeightMismatch, tensors_of

LOOK_SECONDS = 0.05  # between two checks whether the stream was aborted
CONNECT_SECONDS = 120.0  # for NCCL's set-up after all members have come, which takes seconds


class StreamBroken(Exception):
    """The stream was aborted, or a peer is gone."""


# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """The meeting place of a stream's members.

    Attributes:
        store: a file that all can read ("file:PATH"), or "tcp:HOST:PORT".
        group: the group's name, which other processes cannot guess.
        size: the number of its members, with the sender.
        config: for a stream with an adapter, as in `BucketManifest`.
    """

    store: str
    group: str
    size: int
    config: dict[str, Any] = field(default_factory=dict)


def open_store(place: str, seconds: float) -> dist.Store:
    """Return the store at `place`, as a client."""
    kind, _, where = place.partition(":")
    if kind == "file":
        store: dist.Store = dist.FileStore(where, -1)
        store.set_timeout(timedelta(seconds=seconds))
        return store
    host, _, port = where.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))


_left: list[tuple[Any, list[Any]]] = []  # gloo groups with a running broadcast: ending them would wait for it


class Group:
    """A member of the group of a stream.

    Args:
        rank: None: the next free one.
        alive: called repeatedly while this waits.

    Raises:
        StreamBroken: not all have joined within `seconds`, or another member has ended the stream.
    """

    def __init__(
        self,
        store: dist.Store,
        invitation: Invitation,
        device: torch.device,
        seconds: float,
        rank: int | None = None,
        alive: Callable[[], None] = lambda: None,
    ):
        self.name, self.device = invitation.group, device
        self._pending: list[Any] = []  # broadcasts
        self._store, self._alive = dist.PrefixStore(invitation.group, store), alive
        num_receivers, timeout, deadline = invitation.size - 1, timedelta(seconds=seconds), time.monotonic() + seconds
        try:
            if rank is None:
                if (rank := self._store.add("joined", 1)) > num_receivers:
                    raise StreamBroken(f"more than {num_receivers} receivers have joined")
                if rank == num_receivers:
                    self._store.set("all", "1")
            self._wait(lambda: self._store.check(["all"]), deadline, "not all have joined in time")
            if device.type == "cuda":
                self._group: Any = _nccl(self._store, rank, invitation.size, timeout)
                self._connect(min(deadline, time.monotonic() + CONNECT_SECONDS))
            else:
                self._group = dist.ProcessGroupGloo(self._store, rank, invitation.size, timeout)
        except RuntimeError as error:
            raise StreamBroken(f"not all have joined: {error}") from error

    def _connect(self, deadline: float) -> None:
        """Set up NCCL's communicator in a thread: NCCL itself would wait forever for a member that has died since."""
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                with torch.cuda.device(self.device):
                    self._group.eager_connect_single_device(self.device)
                connected.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                connected.set_exception(error)

        threading.Thread(target=connect, daemon=True).start()
        late = "NCCL did not connect all members in time: NCCL_DEBUG=INFO logs why, NCCL_SOCKET_IFNAME names a network"
        self._wait(connected.done, deadline, late)
        connected.result()

    def begin(self, tensor: torch.Tensor) -> Any:
        """Begin to send `tensor` from rank 0, or to receive it, after all earlier broadcasts."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise StreamBroken(f"a peer is gone: {error}") from error
        self._pending.append(work)
        return work

    def finish(self, work: Any, deadline: float) -> None:
        """Wait for a broadcast. Raises StreamBroken at `deadline` (`time.monotonic`) at the latest."""
        try:
            self._wait(work.is_completed, deadline, "a peer did not take part in time")
            work.wait()
        except RuntimeError as error:
            raise StreamBroken(f"a peer is gone: {error}") from error
        self._pending = [other for other in self._pending if other is not work]  # it keeps its tensor

    def _wait(self, done: Callable[[], bool], deadline: float, late: str) -> None:
        look = time.monotonic() + LOOK_SECONDS
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise StreamBroken(late)
            if now > look:
                self._alive()
                if self._store.check(["aborted"]):
                    raise StreamBroken("it was ended because another peer has failed")
                look = now + LOOK_SECONDS
            time.sleep(0.0001)

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> torch.Tensor:
        self.finish(self.begin(tensor), deadline)
        return tensor

    def close(self) -> None:
        """Leave the group. Broadcasts that others wait in fail."""
        self._group.abort()
        _left[:] = [(group, works) for group, works in _left if not all(w.is_completed() for w in works)]
        if not all(work.is_completed() for work in self._pending):
            _left.append((self._group, self._pending))


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group over NCCL. By default torch would end the process if another member fails or dies."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def abort(invitation: Invitation, seconds: float) -> None:
    """End the stream for all that wait in it."""
    dist.PrefixStore(invitation.group, open_store(invitation.store, seconds)).set("aborted", "1")


# ---- buckets ---------------------------------------------------------------------------------------------------------


def bytes_of(bucket: list[TensorRecord]) -> int:
    """Return the bytes of the tensors of a bucket, in whole rows."""
    return bucket[-1].offset + rows_of(bucket[-1].nbytes) * ROW_BYTES


def new_bucket(bucket: list[TensorRecord], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the memory of a bucket: the whole, the part of its tensors, both uint8, and of their checksums, int64."""
    end = bytes_of(bucket)
    memory = torch.empty(end + 8 * len(bucket), dtype=torch.uint8, device=device)
    return memory, memory[:end], memory[end:].view(torch.int64)


def send_header(
    group: Group, session: dict[str, str], buckets: list[list[TensorRecord]]
) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send the receivers the contents; `session`: the version and the nonce.

    Returns:
        The work to finish (`Group.finish`), with the memory that must live until then.
    """
    header = json.dumps({**session, "buckets": [[vars(t) for t in bucket] for bucket in buckets]}).encode()
    length = torch.tensor([len(header)]).to(group.device)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device)
    return [(group.begin(tensor), tensor) for tensor in (length, text)]


def send_bucket(group: Group, memory: torch.Tensor) -> Any:
    """Begin to send. `memory` must live until the returned work is finished (`Group.finish`)."""
    return group.begin(memory)


def receive(
    group: Group, session: dict[str, str], load: Callable[[dict[str, torch.Tensor]], None], deadline: float
) -> None:
    """Receive a stream, and load one bucket while the next arrives.

    Args:
        session: the version and the nonce of the stream.
        load: may keep the tensors, because their memory is not used again.

    Raises:
        StreamBroken: it did not reach its end.
        Exception: the error of `load`, or WeightMismatch; nothing has been loaded after it.
    """
    length = int(group.broadcast(torch.zeros(1, dtype=torch.int64, device=group.device), deadline))
    text = group.broadcast(torch.empty(length, dtype=torch.uint8, device=group.device), deadline)
    header = json.loads(text.cpu().numpy().tobytes())
    buckets = [[TensorRecord.from_json(t) for t in bucket] for bucket in header["buckets"]]
    failure: Exception | None = None
    begun: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # the bucket that is needed now, and the next
    for number, bucket in enumerate(buckets):
        for ahead in buckets[number + len(begun) : number + 2]:
            memory, data, sums = new_bucket(ahead, group.device)
            begun.append((group.begin(memory), data, sums))
        work, data, sums = begun.pop(0)
        group.finish(work, deadline)
        if failure is None:
            try:
                tensors = [{**vars(t), "digest": s} for t, s in zip(bucket, texts_of(sums), strict=True)]
                load(views_of({**header, "tensors": tensors}, session, data).tensors)
            except Exception as error:  # noqa: BLE001 - raised below, when the stream has ended
                failure = error
        del work, data, sums  # before the bucket after the next: there are at most two
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class Views:
    """The tensors of a bucket by name, as views of its memory.

    Attributes:
        header: the tensors in its header, without the checksums.
    """

    header: list[dict[str, Any]]
    packed: list[TensorRecord]
    data: torch.Tensor
    tensors: dict[str, torch.Tensor]


def views_of(header: dict[str, Any], session: dict[str, str], data: torch.Tensor, known: Views | None = None) -> Views:
    """Return the tensors of a bucket after a check of the checksums in its header.

    Args:
        header: its session, and its `tensors` (`TensorRecord`).
        known: returned again for the same kind of bucket in the same memory: an adapter has hundreds of tensors.

    Raises:
        WeightMismatch: they contradict `header` or `session`.
    """
    plan = [{name: value for name, value in t.items() if name != "digest"} for t in header["tensors"]]
    if (got := {name: header[name] for name in session}) != session:
        raise WeightMismatch(f"a bucket of {got}, in a session of {session}", plan[0]["name"])
    same = known is not None and known.header == plan and known.data.numel() == data.numel()
    if known is None or not same or known.data.data_ptr() != data.data_ptr():
        known = _new_views(plan, data)
    found = checksums(data, [rows_of(t.nbytes) for t in known.packed])
    for t, sum_ in zip(header["tensors"], found, strict=True):
        if sum_ != t["digest"]:
            raise WeightMismatch(f"{t['name']}: the bytes received do not have the checksum of those sent", t["name"])
    return known


def _new_views(plan: list[dict[str, Any]], data: torch.Tensor) -> Views:
    packed = [TensorRecord.from_json(t) for t in plan]
    end = 0
    for t in packed:
        if t.offset != end:
            raise WeightMismatch(f"{t.name} is at {t.offset} of its bucket, not at {end}", t.name)
        end += rows_of(t.nbytes) * ROW_BYTES
    if end != data.numel():
        raise WeightMismatch(f"a bucket of {data.numel()} bytes, but its tensors take {end}", packed[0].name)
    return Views(plan, packed, data, tensors_of(packed, data))

"""A stream of weights over a process group: rank 0 sends packed buckets, the others check each and load it.

instep-vllm has a copy of this file, which must not import instep: both ends speak the same protocol.

A bucket is three broadcasts: the length of its header, the header (JSON), and the bytes, in which each tensor begins at
a multiple of ROW_BYTES. A length of 0 ends the stream. A receiver that refuses something goes on reading until the end,
so that all stay in step; `abort` ends a stream at once, for all that wait in it.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ROW_BYTES = 4096
LOOK_SECONDS = 0.05  # between two looks whether the stream was aborted
_WORDS = ROW_BYTES // 4
_ROW_FACTOR = 0x9E3779B97F4A7C15  # odd: its powers are odd, too


class StreamMismatch(Exception):
    """What came is not what the session or its own header says; `tensor` is the first one concerned."""

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(message)
        self.tensor = tensor


class StreamBroken(Exception):
    """The stream was aborted, or a peer is gone."""


# ---- checksums -------------------------------------------------------------------------------------------------------


@functools.cache
def _word_factors(device: torch.device) -> torch.Tensor:
    """Int64 `[_WORDS]`: the numbers of splitmix64 from 0."""
    numbers, mask = [], (1 << 64) - 1
    for i in range(1, _WORDS + 1):
        z = i * _ROW_FACTOR & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        numbers.append(z ^ z >> 31)
    return torch.tensor([_signed(n) for n in numbers], dtype=torch.int64, device=device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def checksums(data: torch.Tensor, num_rows: list[int]) -> list[str]:
    """The checksum of each tensor of a bucket, computed where the bucket is.

    Each 32-bit word is multiplied with a 64-bit number of its own; a checksum is the sum modulo 2^64 (multilinear
    hashing, Lemire and Kaser 2014). It tells swapped, transposed, torn and stale bytes, but is no defence against
    somebody who forges them.

    Args:
        data: uint8 `[sum(num_rows) * ROW_BYTES]`.
        num_rows: of each tensor; what is left of its last row is zero.
    """
    factors = _word_factors(data.device)
    rows = data.view(torch.int32).view(-1, _WORDS)
    sums = torch.cat([(part * factors).sum(1) for part in rows.split(1 << 12)])  # in parts, for the product is larger
    most = max(num_rows)
    powers = torch.full((most,), _signed(_ROW_FACTOR), dtype=torch.int64, device=data.device).cumprod(0)
    places = torch.cat([torch.arange(n) for n in num_rows]).to(data.device)
    totals = torch.cat([sums.new_zeros(1), (sums * powers[places]).cumsum(0)])
    ends = torch.tensor([0, *num_rows], device=data.device).cumsum(0)
    found = totals[ends].diff()
    return [f"{number & (1 << 64) - 1:016x}" for number in found.tolist()]


def checksum(tensor: torch.Tensor) -> str:
    """The checksum of one tensor."""
    data = raw_bytes(tensor)
    rows = rows_of(data.numel())
    padded = data.new_zeros(rows * ROW_BYTES)
    padded[: data.numel()] = data
    return checksums(padded, [rows])[0]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def rows_of(num_bytes: int) -> int:
    """The rows of a bucket that a tensor of so many bytes takes."""
    return max(1, -(-num_bytes // ROW_BYTES))


# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """Where a stream's members meet.

    Attributes:
        store: a file that all see ("file:PATH"), or "tcp:HOST:PORT".
        group: the group's name, which nobody can guess.
        size: the number of its members, the sender included.
    """

    store: str
    group: str
    size: int


def open_store(place: str, seconds: float) -> dist.Store:
    """The store at `place`, as a client."""
    kind, _, where = place.partition(":")
    if kind == "file":
        store: dist.Store = dist.FileStore(where, -1)
        store.set_timeout(timedelta(seconds=seconds))
        return store
    host, _, port = where.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))


_left: list[tuple[Any, Any]] = []  # groups of gloo with a broadcast under way: their end would wait for it


class Group:
    """A member of the group of a stream.

    Args:
        rank: None: the next that is free.
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
        self._pending: Any = None  # the last broadcast
        self._store, self._alive = dist.PrefixStore(invitation.group, store), alive
        if rank is None and (rank := self._store.add("joined", 1)) >= invitation.size:
            raise StreamBroken(f"more than {invitation.size - 1} receivers have joined")
        timeout = timedelta(seconds=seconds)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupNCCL(self._store, rank, invitation.size, options)
            else:
                self._group = dist.ProcessGroupGloo(self._store, rank, invitation.size, timeout)
        except RuntimeError as error:
            raise StreamBroken(f"not all have joined: {error}") from error

    def begin(self, tensor: torch.Tensor) -> Any:
        """Begin to send `tensor` from rank 0, or to receive it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._pending = self._group.broadcast([tensor], options)
            return self._pending
        except RuntimeError as error:
            raise StreamBroken(f"a peer is gone: {error}") from error

    def finish(self, work: Any, deadline: float) -> None:
        """Wait for what was begun. Raises StreamBroken at `deadline` (of `time.monotonic`) at the latest."""
        look = time.monotonic() + LOOK_SECONDS
        try:
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise StreamBroken("a peer did not take part in time")
                if now > look:
                    self._alive()
                    if self._store.check(["aborted"]):
                        raise StreamBroken("it was ended, as another peer has failed")
                    look = now + LOOK_SECONDS
                time.sleep(0.0001)
            work.wait()
        except RuntimeError as error:
            raise StreamBroken(f"a peer is gone: {error}") from error

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> torch.Tensor:
        self.finish(self.begin(tensor), deadline)
        return tensor

    def close(self) -> None:
        """Leave the group; broadcasts that others wait in fail."""
        self._group.abort()
        _left[:] = [(group, work) for group, work in _left if not work.is_completed()]
        if self._pending is not None and not self._pending.is_completed():
            _left.append((self._group, self._pending))


def abort(invitation: Invitation, seconds: float) -> None:
    """End the stream for all that wait in it."""
    dist.PrefixStore(invitation.group, open_store(invitation.store, seconds)).set("aborted", "1")


# ---- buckets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """One tensor of a bucket: Hugging Face name, shape, dtype ("float32"), offset, bytes, checksum."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    checksum: str


def send_bucket(
    group: Group, session: dict[str, str], tensors: list[Packed], data: torch.Tensor, deadline: float
) -> Any:
    """Begin to send one bucket; what it returns is to be finished (`Group.finish`) before the next is sent.

    Args:
        session: the version and the nonce.
    """
    header = json.dumps({**session, "num_bytes": data.numel(), "tensors": [asdict(t) for t in tensors]}).encode()
    group.broadcast(torch.tensor([len(header)], device=group.device), deadline)
    group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device), deadline)
    return group.begin(data)


def send_end(group: Group, deadline: float) -> None:
    group.broadcast(torch.tensor([0], device=group.device), deadline)


def receive(
    group: Group, session: dict[str, str], load: Callable[[dict[str, torch.Tensor]], None], deadline: float
) -> None:
    """Receive a stream, and load one bucket after another.

    Args:
        session: the version and the nonce of every bucket.

    Raises:
        StreamBroken: it did not come to its end.
        Exception: what `load` raised, or StreamMismatch; nothing has been loaded since.
    """
    failure: Exception | None = None
    while True:
        length = int(group.broadcast(torch.zeros(1, dtype=torch.int64, device=group.device), deadline))
        if length == 0:
            break
        text = group.broadcast(torch.empty(length, dtype=torch.uint8, device=group.device), deadline)
        header = json.loads(bytes(text.tolist()))
        data = torch.empty(header["num_bytes"], dtype=torch.uint8, device=group.device)
        group.broadcast(data, deadline)
        if failure is None:
            try:
                load(_checked(header, session, data))
            except Exception as error:  # noqa: BLE001 - raised below, when the stream has ended
                failure = error
    if failure is not None:
        raise failure


def _checked(header: dict[str, Any], session: dict[str, str], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, which are views of `data`."""
    packed = [Packed(**{**t, "shape": tuple(t["shape"])}) for t in header["tensors"]]
    if (got := {name: header[name] for name in session}) != session:
        raise StreamMismatch(f"a bucket of {got}, in a session of {session}", packed[0].name)
    found = checksums(data, [rows_of(t.nbytes) for t in packed])
    tensors: dict[str, torch.Tensor] = {}
    for t, sum_ in zip(packed, found, strict=True):
        dtype = getattr(torch, t.dtype)
        if t.name in tensors:
            raise StreamMismatch(f"{t.name} came twice", t.name)
        if math.prod(t.shape) * dtype.itemsize != t.nbytes:
            raise StreamMismatch(f"{t.name}: {t.nbytes} bytes of shape {t.shape} and dtype {t.dtype}", t.name)
        if sum_ != t.checksum:
            raise StreamMismatch(f"{t.name}: the bytes received do not have the checksum of those sent", t.name)
        tensors[t.name] = data[t.offset : t.offset + t.nbytes].view(dtype).view(t.shape)
    return tensors

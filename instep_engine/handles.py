"""Buckets of weights in memory that trainer and engine both open, and the line for their messages.

Both ends, the trainer and the engine, use this file.

A sender allocates its buckets once, and sends each receiver the data to open them: on a GPU a CUDA IPC handle, whose
fields travel as text, on a CPU a file in shared memory. From then on only headers travel, as JSON over a Unix-domain
socket in the run's folder:

    receiver -> sender  {"device": UUID}                      the joining worker
    sender -> receiver  {"buckets": [HANDLE, ...]}            or {"elsewhere": PATH}, where the rank on its GPU listens
    sender -> receiver  {"slot": 0, "num_bytes": ..., "tensors": [...], "version": ..., "nonce": ...}   a full bucket
    receiver -> sender  {"free": 0}                           it has copied all that it needs
    sender -> receiver  {"end": true}

The sender waits until the bytes are in the bucket before it sends the header. The receiver waits until its copies are
done before it frees the bucket. A receiver that refuses something keeps reading, so that all stay in step. A process
that ends closes its line.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from instep_engine.mapped import cuda_record, file_record, new_file, open_memory
from instep_engine.place import NoPlace, check_memory_folder
from instep_engine.stream import Invitation, StreamBroken, Views, views_of

LOOK_SECONDS = 0.05  # between two calls of `look` while a line is silent
KIND = "unix:"


# ---- lines -----------------------------------------------------------------------------------------------------------


class Line:
    """One end of a connection that carries JSON.

    Args:
        look: called repeatedly while the line waits for its peer; it may raise.
    """

    def __init__(self, connection: socket.socket, look: Callable[[], None] = lambda: None):
        self._socket, self._look = connection, look

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Send a message. Raises StreamBroken: the peer is gone, or takes nothing until `deadline`."""
        data = json.dumps(message).encode()
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(struct.pack("<Q", len(data)) + data)
        except OSError as error:
            raise StreamBroken(f"a peer is gone: {error}") from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message. Raises StreamBroken: the peer is gone, or silent until `deadline`."""
        (length,) = struct.unpack("<Q", self._exactly(8, deadline))
        message: dict[str, Any] = json.loads(self._exactly(length, deadline))
        return message

    def _exactly(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            if (left := deadline - time.monotonic()) <= 0:
                raise StreamBroken("a peer did not take part in time")
            try:
                self._socket.settimeout(min(left, LOOK_SECONDS))
                part = self._socket.recv(length - len(data))
            except TimeoutError:
                self._look()
                continue
            except OSError as error:
                raise StreamBroken(f"a peer is gone: {error}") from error
            if not part:
                raise StreamBroken("a peer is gone: it has closed its line")
            data += part
        return bytes(data)

    def close(self) -> None:
        self._socket.close()


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`."""
    listener = socket.socket(socket.AF_UNIX)
    _at(path, listener.bind)
    listener.listen(128)
    return listener


def connect(path: Path, look: Callable[[], None] = lambda: None) -> Line:
    """Return a line to the listener at `path`. Raises StreamBroken: there is none; NoPlace: not in a run's folder."""
    check_memory_folder(str(path.parent))
    connection = socket.socket(socket.AF_UNIX)
    try:
        _at(path, connection.connect)
    except OSError as error:
        connection.close()
        raise StreamBroken(f"no process listens at {path}: {error}") from error
    return Line(connection, look)


def _at(path: Path, call: Callable[[str], None]) -> None:
    """Call with a short name of `path`, because names of sockets have at most 107 characters."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        call(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


# ---- buckets ---------------------------------------------------------------------------------------------------------


def device_key(device: torch.device) -> str:
    """Return the name by which trainer and engine recognize a common device: the UUID of the GPU, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


class Bucket:
    """Memory on `device` that other processes can open; on a CPU it is a file in `folder`.

    Attributes:
        data: uint8 `[num_bytes]`.

    Raises:
        OSError: there is no room in the shared memory of the host.
    """

    def __init__(self, num_bytes: int, device: torch.device, folder: Path):
        self._path: Path | None = None
        if device.type == "cuda":
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._path = folder / f"{secrets.token_hex(8)}.bin"
            self.data = new_file(self._path, num_bytes)

    def handle(self) -> dict[str, Any]:
        """Return the record by which one more process opens it."""
        if self._path is not None:
            return file_record(self._path, self.data.numel())
        return cuda_record(self.data.untyped_storage())

    def unlink(self) -> None:
        """Prevent other processes from opening it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def synchronize(device: torch.device) -> None:
    """Wait for the work of this process on its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ---- the receiver ----------------------------------------------------------------------------------------------------


class Receiver:
    """A worker of an engine that has joined. Its line and the buckets stay open for later sessions.

    Args:
        alive: called repeatedly while it waits.

    Raises:
        StreamBroken: no process listens, or no rank of the trainer is on this worker's GPU.
    """

    def __init__(
        self, invitation: Invitation, device: torch.device, deadline: float, alive: Callable[[], None] = lambda: None
    ):
        self.name, self._device = invitation.group, device
        answer: dict[str, Any] = {"elsewhere": invitation.store.removeprefix(KIND)}
        self._line: Line | None = None
        self._views: dict[int, Views] = {}  # of the last bucket in each slot
        try:
            while "elsewhere" in answer:
                self.close()
                self._line = connect(Path(answer["elsewhere"]), alive)
                self._line.send({"device": device_key(device)}, deadline)
                answer = self._line.receive(deadline)
            if "refused" in answer:
                raise StreamBroken(answer["refused"])
            self._buckets = [open_memory(handle, device) for handle in answer["buckets"]]
        except StreamBroken:
            self.close()
            raise
        except (OSError, NoPlace, RuntimeError) as error:
            self.close()
            raise StreamBroken(f"the trainer's buckets cannot be opened: {error}") from error

    def receive(
        self, session: dict[str, str], load: Callable[[dict[str, torch.Tensor]], None], deadline: float
    ) -> None:
        """Receive a stream, and load one bucket after another. The tensors for `load` are invalid after it returns.

        A bucket like the last one in its slot is given as the same dict, of the same views.

        Args:
            session: the version and the nonce of every bucket.

        Raises:
            StreamBroken: it did not come to its end.
            Exception: what `load` raised, or WeightMismatch; nothing has been loaded since.
        """
        assert self._line is not None
        failure: Exception | None = None
        while "end" not in (header := self._line.receive(deadline)):
            slot = header["slot"]
            if failure is None:
                try:
                    data = self._buckets[slot][: header["num_bytes"]]
                    self._views[slot] = views = views_of(header, session, data, self._views.get(slot))
                    load(views.tensors)
                except Exception as error:  # noqa: BLE001 - raised below, when the stream has ended
                    failure = error
            synchronize(self._device)
            self._line.send({"free": slot}, deadline)
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

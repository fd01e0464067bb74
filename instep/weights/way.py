"""A way carries one version of the weights from the trainer to the engines: the protocol, and the names of all ways.

Each way is one file, `weights/<name>.py`, with both of its sides: `send` runs in every worker, `drive` in the
controller. A session (`controller/sync/session.py`) owns what comes before and after. This file needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from instep.weights.manifest import TensorRecord
    from instep.weights.source import WeightSource

WAYS = ("shm", "disk")  # choices of --sync-way; the first is the default
ON_ONE_HOST = frozenset({"shm"})  # trainer and engines share what they carry the weights through
GOLDEN = "disk"  # the slow twin that every other way is compared with


@dataclass(frozen=True)
class Order:
    """What every worker is told when it is to send the weights.

    Attributes:
        version, nonce: those of the session.
        folder: where a way that writes files puts them.
        bucket_bytes: about so many bytes travel at a time.
        hf_checkpoint: configuration and tokenizer of the model.
    """

    version: str
    nonce: str
    folder: Path
    bucket_bytes: int
    hf_checkpoint: Path


@dataclass(frozen=True)
class Sent:
    """What has travelled.

    Attributes:
        tensors: one record per tensor; the digests are those of `digest_kind`.
    """

    tensors: tuple[TensorRecord, ...]
    digest_kind: str

    @property
    def digests(self) -> dict[str, str]:
        return {t.name: t.digest for t in self.tensors}


class Carriage(Protocol):
    """The session as a way's driver sees it.

    Attributes:
        memory_folder: in shared memory of this host.
        disk_folder: on a disk that trainer and engines see; None: any folder of this host is such a one.
    """

    memory_folder: Path
    disk_folder: Path | None

    def publish(self, folder: Path, on_event: Callable[[Any], None]) -> None:
        """Let every worker `send` into `folder`; `on_event` gets what they emit, while they go on."""

    def deliver(self, info: dict[str, Any]) -> None:
        """Let every engine of the session load what `info` names (`update_info` of `/update_weights`)."""

    def seconds_left(self) -> float:
        """Seconds until the deadline. Raises SyncError when there are none."""


class Way(Protocol):
    """Both sides of a way.

    Attributes:
        digest: makes the digest of a tensor; digests of one `digest_kind` can be compared.
    """

    digest_kind: str
    digest: Callable[[torch.Tensor], str]

    def send(self, source: WeightSource, order: Order, emit: Callable[[Any], None]) -> None:
        """The workers' side; collective. `emit` tells the driver of what is ready."""

    def drive(self, carriage: Carriage) -> Sent:
        """The controller's side: publish, and deliver to the engines what is emitted."""


def way_named(name: str) -> Way:
    """The way `name`, one of WAYS."""
    way: Way = importlib.import_module(f"instep.weights.{name}").WAY
    return way

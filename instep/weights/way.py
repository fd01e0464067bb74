"""The ways of a weight sync: the protocol of a way, and the names of all ways. This file needs no torch.

A way carries one weight version from the trainer to the engines. It is one file, `weights/<name>.py`. Its `send` runs
in every worker and its `drive` in the controller, within a session (`controller/sync/session.py`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from instep.weights.source import WeightSource
    from instep_engine.manifest import TensorRecord

SINGLE_COPY = "single-copy"  # the engine computes with the memory that the trainer writes into
AUTO = "auto"  # the value of --weight-sync that chooses a way
LORA = "lora"
WAYS = ("ipc", "shm", SINGLE_COPY, "disk", "nccl", LORA, "restart")
ON_ONE_HOST = frozenset({"ipc", "shm", SINGLE_COPY})  # these need trainer and engines on one host
OF_ADAPTERS = frozenset({LORA, "lora_ipc", "lora_disk"})  # these carry only an adapter; the engines have its base
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
Sharing = Literal["shared", "apart"] | None
GOLDEN = "disk"  # the slow way that every other way is compared with
RESTART = "restart"  # engines restart on a checkpoint, and need not load one while they run


@dataclass(frozen=True)
class Order:
    """The order to send the weights, for every worker.

    Attributes:
        version, nonce: the weight version and the nonce of the session.
        folder: the folder for ways that write files.
        bucket_bytes: about how many bytes travel at a time.
        hf_checkpoint: the folder with configuration and tokenizer of the model.
        seconds: how long the session may still take.
        audience: the receiving processes; num_receivers: the number of their workers.
        host: the sender's address for other hosts; "": all are on one host.
        device: the worker's device, as torch names it.
    """

    version: str
    nonce: str
    folder: Path
    bucket_bytes: int
    hf_checkpoint: Path
    seconds: float = 600.0
    audience: str = ""
    num_receivers: int = 0
    host: str = ""
    device: str = "cpu"


@dataclass(frozen=True)
class Sent:
    """What was sent: one record per tensor, with a digest of `digest_kind`; and the seconds of its parts."""

    tensors: tuple[TensorRecord, ...]
    digest_kind: str
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def digests(self) -> dict[str, str]:
        return {t.name: t.digest for t in self.tensors}


class Carriage(Protocol):
    """A session, as `Way.drive` uses it.

    Attributes:
        version: the weight version of the session.
        memory_folder: a folder in the shared memory of this host.
        disk_folder: a folder that trainer and engines can read; None: they see all folders of this host.
    """

    version: str
    memory_folder: Path
    disk_folder: Path | None

    def audience(self) -> str:
        """The processes of the session's engines, as a text."""

    def receivers(self) -> tuple[str, int]:
        """Return `audience`, and the total number of their workers."""

    def publish(
        self, folder: Path, on_event: Callable[[Any], None], audience: str = "", num_receivers: int = 0
    ) -> None:
        """Let every worker `send` into `folder`; `on_event` gets what they emit."""

    def pause(self) -> None:
        """Stop generation in the engines until the end of the session. `deliver` does so first, if it was not done.

        An adapter is delivered before the pause, because it is not used before the session ends.
        """

    def show(self, info: dict[str, Any]) -> None:
        """Let every engine of the session check `info`. This changes nothing, so the engines need not be paused."""

    def deliver(self, info: dict[str, Any], failed: Callable[[], None] | None = None) -> None:
        """Let every engine of the session load what `info` names, the `update_info` of `/update_weights`.

        `failed` is called as soon as one of them fails.
        """

    def start_anew(self, checkpoint: Path) -> list[str]:
        """End the engines of the session and restart them on `checkpoint`. Return the URLs of those that are ready.

        Raises SyncError: this run has not started them. Raises EngineGone: none is ready within its time.
        """

    def seconds_left(self) -> float:
        """Return the seconds until the deadline of the session. Raises SyncError: it has passed."""


class Way(Protocol):
    """Both sides of a way.

    Attributes:
        digest_kind: the kind of `digest`; only digests of one kind can be compared.
        digest: the function that digests a tensor.
    """

    digest_kind: str
    digest: Callable[[torch.Tensor], str]

    def send(self, source: WeightSource, order: Order, emit: Callable[[Any], None]) -> None:
        """Send the weights: the workers' side, collective. `emit` reports to the controller what is ready."""

    def drive(self, carriage: Carriage) -> Sent:
        """Drive the session: the controller's side. It publishes, and delivers to the engines what is emitted."""


def expandable() -> str | None:
    """Return the environment variable, if one is set so, by which torch allocates memory without IPC handles."""
    values = {name: os.environ.get(name, "").replace(" ", "").lower() for name in ALLOCATOR_VARIABLES}
    return next((name for name, value in values.items() if "expandable_segments:true" in value), None)


def auto_way(one_host: bool, sharing: Sharing = None) -> tuple[str, str]:
    """Return the meaning of `--weight-sync auto`, and the reason.

    Args:
        one_host: trainer, engines and controller share a host.
        sharing: "shared" if each GPU of the engines has a rank of the trainer, "apart" if none has; None: there are no
            GPUs, or it is not known.
    """
    if one_host and sharing == "shared":
        if (name := expandable()) is None:
            return "ipc", "trainer and engines are on the same GPUs"
        return "shm", f"with expandable_segments in {name} no process can open GPU memory of another, as ipc needs"
    if sharing == "apart":
        return "nccl", "trainer and engines have separate GPUs"
    if one_host:
        return "shm", "trainer and engines share this host's memory"
    return "disk", "an engine is on another host than the trainer's rank 0 or this process"


def way_of_adapters(one_host: bool, sharing: Sharing = None) -> tuple[str, str]:
    """Return the meaning of `--weight-sync lora`, and the reason; see `auto_way`."""
    way, why = auto_way(one_host, sharing)
    if way == "ipc":
        return "lora_ipc", "in buckets on the GPUs that trainer and engines share"
    if not one_host:
        return "lora_disk", "through --run-dir, because an engine is on another host"
    return LORA, "in shared memory" + (f": {why}" if sharing == "shared" else "")


def way_meant(named: str, one_host: bool, sharing: Sharing = None) -> tuple[str, str]:
    """Return the way that `--weight-sync` means, and why if its name does not say it; see `auto_way`."""
    if named == LORA:
        return way_of_adapters(one_host, sharing)
    return auto_way(one_host, sharing) if named == AUTO else (named, "")


def golden(way: str) -> str:
    """Return the slow way that `way` is compared with. Engines of the way `restart` may support no other one."""
    return "lora_disk" if way in OF_ADAPTERS else RESTART if way == RESTART else GOLDEN


def way_named(name: str) -> Way:
    """Return the way `name`: one of WAYS, the golden way of one, or one of `way_of_adapters`."""
    way: Way = importlib.import_module(f"instep.weights.{name.replace('-', '_')}").WAY
    return way

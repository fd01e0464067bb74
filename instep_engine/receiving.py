"""The weight sessions of an engine's worker: reads and checks what a trainer sends, by every way of the weights."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from instep_engine import BROKEN, OTHER_MEMORY
from instep_engine.bucket import read_bucket, read_checkpoint
from instep_engine.handles import Receiver
from instep_engine.manifest import BucketManifest, WeightMismatch
from instep_engine.stream import Group, Invitation, StreamBroken, open_store, receive


class Receiving:
    """Checks what comes. An engine's subclass loads it, or compares what it holds.

    Attributes:
        session: the version and the nonce of the current session; None without one.
        delivered: the names of the tensors that have come in it.
        shapes: those of the model's tensors in its checkpoint, by name; empty if they are unknown.
        nonce: of the memory that this worker shares with a trainer.
        keeps: whether `load` may keep tensors. Then tensors are copied if the next bucket uses their memory.
    """

    nonce = ""
    keeps = True

    def __init__(self, device: torch.device, alive: Callable[[], None] = lambda: None):
        """Store the settings. `alive` is called repeatedly while this waits or reads."""
        self.session: tuple[str | None, str | None] | None = None
        self.delivered: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._at, self._alive = device, alive
        self._group: Group | Receiver | None = None  # of the last stream, open for later ones

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Load weights by their names in a checkpoint, and return the names of those that the model has.

        Args:
            exact: all of them must be the model's, in its own dtypes.
        """
        raise NotImplementedError

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], lasting: bool) -> None:
        """Keep tensors of an adapter. `lasting`: their memory is used again, by the same object then."""
        raise NotImplementedError

    def compare_start(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        """Compare the checkpoint `path`, on which the engine was restarted, with what it holds."""
        raise NotImplementedError

    def compare_samples(self, told: Mapping[str, str]) -> None:
        """Compare digests of samples, by name, with the memory that a trainer has written into."""
        raise NotImplementedError

    def check_names(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightMismatch for a tensor that came earlier in this session, or that the model does not have."""
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if name in self.delivered:
                raise WeightMismatch(f"{name} came twice", name)
            if self.shapes and name not in self.shapes:
                raise WeightMismatch(f"{name} is no tensor of this model", name)
            if self.shapes and shape != self.shapes[name]:
                raise WeightMismatch(f"{name}: received shape {shape}, the model has {self.shapes[name]}", name)

    def leave_stream(self) -> None:
        """Leave the group of former streams."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def receive_weights(self, info: Mapping[str, Any]) -> None:
        """Receive an update of the current session.

        Raises:
            WeightMismatch: it differs from the session or its own manifest, or the engine cannot load it.
            KeyError, TypeError, ValueError: it is malformed, or of an unknown backend.
        """
        backend = info["backend"]
        if backend == "memory":
            if self.nonce not in info["memory"]:
                raise WeightMismatch(OTHER_MEMORY)
        elif backend == "single-copy":
            if (told := info["digests"].get(self.nonce)) is None:
                raise WeightMismatch("the trainer is attached to other memory than this engine's")
            self.compare_samples(told)
            self.delivered.update(told)
        elif backend in ("nccl", "ipc", "lora_ipc"):
            self._receive_stream(info)
        elif backend == "shm":
            self._load(read_bucket(self._manifest(info)), exact=True)
        elif backend == "disk":
            self._load(self._files(info), exact=False)
        elif backend == "restart":
            tensors = self._files(info)
            self.compare_start(info["path"], tensors)
            self.delivered.update(tensors)
        elif backend == "lora":
            self._load_adapter(read_bucket(self._manifest(info)), info["manifest"]["config"])
        elif backend == "lora_disk":
            tensors = self._files(info)
            try:
                config = json.loads((Path(info["path"]) / "adapter_config.json").read_text())
            except OSError as error:
                raise WeightMismatch(f"no adapter in {info['path']}: {error}") from error
            self._load_adapter(tensors, config)
        else:
            raise KeyError(backend)

    def _load(self, tensors: dict[str, torch.Tensor], exact: bool) -> None:
        self.delivered.update(self.load(tensors, exact))

    def _load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], lasting: bool = False) -> None:
        self.load_adapter(tensors, config, lasting)
        self.delivered.update(tensors)

    def _manifest(self, info: Mapping[str, Any]) -> BucketManifest:
        """Return the manifest of a bucket or checkpoint of this session."""
        manifest = BucketManifest.from_json(info["manifest"])
        if (got := (manifest.version, manifest.nonce)) != self.session:
            first = next((t.name for t in manifest.tensors), None)
            raise WeightMismatch(f"bucket of version and nonce {got}, session of {self.session}", first)
        return manifest

    def _files(self, info: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint or an adapter on disk, compared with its manifest if one was sent."""
        return read_checkpoint(info["path"], self._manifest(info) if info.get("manifest") else None, self._alive)

    def _receive_stream(self, info: Mapping[str, Any]) -> None:
        """Receive all weights, or an adapter, and load one bucket after another."""
        invitation, seconds = Invitation(**info["invitation"]), float(info["seconds"])
        deadline = time.monotonic() + seconds

        def load(tensors: dict[str, torch.Tensor]) -> None:
            if info["backend"] == "lora_ipc":
                return self._load_adapter(tensors, invitation.config, lasting=True)
            if info["backend"] == "ipc" and self.keeps:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self._load(tensors, exact=True)

        session = dict(zip(("version", "nonce"), map(str, self.session or ()), strict=True))
        try:
            if self._group is None or self._group.name != invitation.group:
                self.leave_stream()
                if info["backend"] == "nccl":
                    store = open_store(invitation.store, seconds)
                    self._group = Group(store, invitation, self._at, seconds, alive=self._alive)
                else:
                    self._group = Receiver(invitation, self._at, deadline, alive=self._alive)
            if isinstance(self._group, Receiver):
                self._group.receive(session, load, deadline)
            else:
                receive(self._group, session, load, deadline)
        except StreamBroken as error:
            self.leave_stream()
            raise WeightMismatch(f"{BROKEN}: {error}") from error

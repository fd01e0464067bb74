"""The engine's side of a weight sync: sessions that check all bytes before they load them (docs/architecture.md)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from instep.checkpoints.adapter import CONFIG
from instep.checkpoints.weight_files import weight_files, weight_names
from instep.engines.embedded.adapter import Adapter
from instep.engines.embedded.protocol import HttpError
from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.system.processes import pulse
from instep.weights.way import OF_ADAPTERS
from instep_engine import OTHER_MEMORY
from instep_engine.bucket import read_bucket, read_checkpoint
from instep_engine.manifest import BucketManifest, WeightMismatch, digest, dtype_name, tensor_bytes
from instep_engine.streams import Streams

FAILED, NOT_STARTED = "the last weight update failed", "no weight update was started: POST /start_weight_update first"


class LiveWeights:
    """The live weights by the names of their checkpoint, written in place; tied weights appear once.

    Tensors that make one weight together, such as the experts of a layer, wait in `pending` for the last of them.
    `failure` says why nothing may be generated: a session failed, and the parameters may be of two weight versions.
    """

    nonce = ""  # of the memory that it shares with a trainer

    def __init__(self, model: PreTrainedModel, folder: Path):
        self.weights = named_weights(model)
        self.names = CheckpointNames(model, weight_names(weight_files(folder)))
        self.expected = {
            name: (group, torch.empty(shape, dtype=self.weights[group.model[0]].dtype, device="meta"))
            for group in self.names.groups
            for name, shape in zip(group.checkpoint, group.shapes, strict=True)
        }
        self.aliases = set(model.state_dict()) - set(self.weights)  # tied names
        self.pending: dict[str, torch.Tensor] = {}
        self.version, self.failure = "default", ""
        self.session: tuple[str | None, str | None] | None = None  # version, nonce
        self.delivered: set[str] = set()
        self._streams = Streams(next(iter(self.weights.values())).device, alive=pulse)
        self.adapter = Adapter(self.weights)

    def start(self, version: str | None, nonce: str | None) -> None:
        self.abandon()
        self.session, self.delivered, self.pending = (version, nonce), set(), {}
        self.adapter.received = {}

    def update(self, info: Any) -> int:
        """Check and load a bucket or checkpoint; returns its number of tensors. A WeightMismatch fails the session."""
        if self.session is None:
            raise HttpError("SessionError", NOT_STARTED)
        if isinstance(info, dict) and info.get("backend") == "memory":
            if not isinstance(info.get("memory"), list) or self.nonce not in info["memory"]:
                raise HttpError("WeightMismatch", OTHER_MEMORY)
            return 0
        try:
            written = self._loaders()[info["backend"]](info)
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # also a backend that is none of these
            raise HttpError("BadRequestError", f"update_info is malformed: {error!r}") from error
        except WeightMismatch as error:
            self.session = None
            if info["backend"] not in OF_ADAPTERS:  # which write nothing before `finish`
                self.failure = f"{FAILED}: {error.what}"
            raise HttpError("WeightMismatch", error.what, error.tensor) from error
        self.delivered.update(written)
        return len(written)

    def _loaders(self) -> dict[str, Callable[[dict[str, Any]], dict[str, torch.Tensor]]]:
        """By backend what loads an update, and returns its tensors."""
        return {
            "shm": lambda info: self._write(read_bucket(self._manifest(info)), exact=True),
            "disk": lambda info: self._write(self._checkpoint(info), exact=False),
            "restart": self._compare_checkpoint,
            "nccl": self._receive,
            "ipc": self._receive,
            "lora": lambda info: self._adapt(read_bucket(self._manifest(info)), info["manifest"]["config"]),
            "lora_disk": lambda info: self._adapt(self._files(info), _adapter_config(Path(info["path"]))),
            "lora_ipc": self._receive,
        }

    def finish(self, version: str | None) -> str:
        """End the session and return the new version. Raises WeightMismatch if a tensor was not delivered."""
        if self.session is None:
            raise HttpError("SessionError", NOT_STARTED)
        started = self.session[0]
        missing = [] if self.adapter.received else [name for name in self.expected if name not in self.delivered]
        self.session, self.failure = None, f"{FAILED}: {missing[:3]} not delivered" if missing else ""
        if missing:
            raise HttpError("WeightMismatch", f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])
        if self.adapter.received:
            self.failure = f"{FAILED}: the adapter is not whole"
            try:
                self.adapter.merge()
            except WeightMismatch as error:
                raise HttpError("WeightMismatch", error.what, error.tensor) from error
            self.failure = ""
        return version or started or self.version

    def abandon(self) -> None:
        """Drop an unfinished session; if it has written weights already, this is a failure."""
        if self.session is not None and self.delivered and not self.adapter.received:
            self.failure = f"{FAILED}: it was not finished"
        self.session = None

    def digests(self) -> dict[str, str]:
        """The xxh3-128 of the bytes of each live weight, as in a manifest."""
        digests = {}
        for group in self.names.groups:
            live = {name: self.weights[name].detach() for name in group.model}
            for name, tensor in zip(group.checkpoint, self.names.to_checkpoint(group, live), strict=True):
                pulse()
                digests[name] = digest(tensor_bytes(tensor.cpu()))
        return digests

    def _manifest(self, info: dict[str, Any]) -> BucketManifest:
        """The manifest of a bucket or checkpoint of this session."""
        manifest = BucketManifest.from_json(info["manifest"])
        manifest.check_session(*(self.session or (None, None)))
        return manifest

    def _adapt(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.adapter.receive(tensors, config)
        return {name: self.adapter.received[name] for name in tensors}

    def _receive(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Receive all weights, or an adapter, as a stream."""
        received: dict[str, torch.Tensor] = {}

        def load(tensors: dict[str, torch.Tensor]) -> None:
            if info["backend"] == "lora_ipc":
                received.update(self._adapt(tensors, info["invitation"]["config"]))
                return
            if info["backend"] == "ipc":  # `pending` keeps some of them
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            received.update(self._write(tensors, exact=True))
            self.delivered.update(received)

        version, nonce = self.session or (None, None)
        self._streams.receive(info, {"version": str(version), "nonce": str(nonce)}, load)
        return received

    def _compare_checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compare the live weights with the checkpoint that this engine was started on."""
        tensors = self._checkpoint(info)
        for name in sorted(tensors.keys() - self.expected.keys()):
            raise WeightMismatch(f"{name} is no tensor of this model", name)
        for group in self.names.groups:
            live = self.names.to_checkpoint(group, {name: self.weights[name].detach() for name in group.model})
            for name, weight in zip(group.checkpoint, live, strict=True):
                pulse()
                if name in tensors and not same_bits(weight, tensors[name].to(weight.device, weight.dtype)):
                    raise WeightMismatch(f"{name} of the checkpoint is not what this engine holds", name)
        return tensors

    def _files(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint or an adapter on disk, compared with its manifest where one was sent."""
        return read_checkpoint(info["path"], self._manifest(info) if "manifest" in info else None, pulse)

    def _checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a Hugging Face checkpoint but for tied ones."""
        return {name: tensor for name, tensor in self._files(info).items() if name not in self.aliases}

    def _write(self, tensors: dict[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
        """Write all tensors or none; with `exact` they must have the dtype of the model."""
        for name, tensor in tensors.items():
            known = self.expected.get(name)
            if known is None or name in self.delivered:
                problem = "is no tensor of this model" if known is None else "came twice"
                raise WeightMismatch(f"{name} {problem}", name)
            weight = known[1]
            if tensor.shape != weight.shape or (exact and tensor.dtype != weight.dtype):
                got, want = ((tuple(t.shape), dtype_name(t.dtype)) for t in (tensor, weight))
                raise WeightMismatch(f"{name}: received shape and dtype {got}, the model has {want}", name)
        self.pending |= tensors
        for group in {id(group): group for group, _ in (self.expected[name] for name in tensors)}.values():
            if all(name in self.pending for name in group.checkpoint):
                pulse()
                parts = [self.pending.pop(name) for name in group.checkpoint]
                for name, tensor in self.names.to_model(group, parts).items():
                    self.weights[name].copy_(tensor)
                self.adapter.forget(group.model)
        return tensors


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except OSError as error:
        raise WeightMismatch(f"no adapter in {folder}: {error}") from error
    return config


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit, also where they are not numbers."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.shape == b.shape and torch.equal(*bits)

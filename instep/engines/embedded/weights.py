"""The engine's side of a weight sync: sessions that check all bytes before they load them (docs/architecture.md)."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from instep.checkpoints.adapter import CONFIG, read_adapter
from instep.checkpoints.weight_files import opened, weight_files, weight_names
from instep.engines.embedded.adapter import Adapter
from instep.engines.embedded.protocol import HttpError
from instep.errors import CheckpointError
from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.system.processes import pulse
from instep.weights.way import BROKEN, OF_ADAPTERS, OTHER_MEMORY
from instep_engine.bucket import read_bucket
from instep_engine.handles import Receiver
from instep_engine.manifest import BucketManifest, WeightMismatch, digest, dtype_name, record_of, tensor_bytes
from instep_engine.place import NoPlace, check_checkpoint
from instep_engine.stream import Group, Invitation, StreamBroken, StreamMismatch, open_store, receive

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
        self.group: Group | Receiver | None = None  # of the last stream
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
            loaders = {"shm": self._load_bucket, "disk": self._load_checkpoint, "nccl": self._receive}
            loaders |= {"ipc": self._receive, "lora_ipc": self._receive}
            loaders |= {"lora": self._receive_bucket, "lora_disk": self._receive_checkpoint}
            loaders["restart"] = self._compare_checkpoint
            written = loaders[info["backend"]](info)
        except (KeyError, TypeError) as error:  # also a backend that is none of these
            raise HttpError("BadRequestError", f"update_info is malformed: {error!r}") from error
        except HttpError as error:
            self.session = None
            if info["backend"] not in OF_ADAPTERS:  # which write nothing before `finish`
                self.failure = f"{FAILED}: {error}"
            raise
        self.delivered.update(written)
        return len(written)

    def finish(self, version: str | None) -> str:
        """End the session and return the new version. Raises WeightMismatch if a tensor was not delivered."""
        if self.session is None:
            raise HttpError("SessionError", NOT_STARTED)
        started = self.session[0]
        if self.adapter.received:
            self.session, self.failure = None, f"{FAILED}: the adapter is not whole"
            self.adapter.merge()
            self.failure = ""
            return version or started or self.version
        missing = [name for name in self.expected if name not in self.delivered]
        self.session, self.failure = None, f"{FAILED}: {missing[:3]} not delivered" if missing else ""
        if missing:
            raise HttpError("WeightMismatch", f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])
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

    def _load_bucket(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        return self._write(self._read_bucket(info), exact=True)

    def _receive_bucket(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors = self._read_bucket(info)
        self.adapter.receive(tensors, info["manifest"]["config"])
        return tensors

    def _receive_checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """An adapter on disk, in peft's format."""
        try:
            check_checkpoint(info["path"])
            config = json.loads((Path(info["path"]) / CONFIG).read_text())
            tensors = read_adapter(Path(info["path"]))
        except (CheckpointError, NoPlace, OSError, ValueError) as error:
            raise HttpError("WeightMismatch", f"no adapter in {info['path']}: {error}") from error
        self._compare_records(info, tensors)
        self.adapter.receive(tensors, config)
        return tensors

    def _manifest(self, info: dict[str, Any]) -> BucketManifest:
        """The manifest of a bucket or checkpoint of this session."""
        manifest = BucketManifest.from_json(info["manifest"])
        if (got := (manifest.version, manifest.nonce)) != self.session:
            first = next((record.name for record in manifest.tensors), None)
            raise HttpError("WeightMismatch", f"bucket of version and nonce {got}, session of {self.session}", first)
        return manifest

    def _read_bucket(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        manifest = self._manifest(info)
        try:
            return read_bucket(manifest)
        except WeightMismatch as error:
            raise HttpError("WeightMismatch", error.what, error.tensor) from error

    def _receive(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Receive all weights, or an adapter, as a stream."""
        invitation, seconds = Invitation(**info["invitation"]), float(info["seconds"])
        deadline = time.monotonic() + seconds
        version, nonce = self.session or (None, None)
        received: dict[str, torch.Tensor] = {}

        def load(tensors: dict[str, torch.Tensor]) -> None:
            if info["backend"] == "lora_ipc":
                self.adapter.receive(tensors, info["config"])
                received.update({name: self.adapter.received[name] for name in tensors})
                return
            if isinstance(self.group, Receiver):  # `pending` keeps some of them
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            written = self._write(tensors, exact=True)
            received.update(written)
            self.delivered.update(written)

        try:
            if self.group is None or self.group.name != invitation.group:
                self._leave_group()
                device = next(iter(self.weights.values())).device
                if info["backend"] != "nccl":
                    self.group = Receiver(invitation, device, deadline, alive=pulse)
                else:
                    self.group = Group(open_store(invitation.store, seconds), invitation, device, seconds, alive=pulse)
            session = {"version": str(version), "nonce": str(nonce)}
            if isinstance(self.group, Receiver):
                self.group.receive(session, load, deadline)
            else:
                receive(self.group, session, load, deadline)
        except StreamMismatch as error:  # the stream has come to its end, and the group stays
            raise HttpError("WeightMismatch", f"the stream of weights: {error}", error.tensor) from error
        except StreamBroken as error:
            self._leave_group()
            raise HttpError("WeightMismatch", f"{BROKEN}: {error}") from error
        return received

    def _leave_group(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def _load_checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Load a Hugging Face checkpoint, whose dtype may differ from the model's, but not its names and shapes."""
        return self._write(self._checkpoint(info), exact=False)

    def _compare_checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compare the live weights with the checkpoint that this engine was started on."""
        tensors = self._checkpoint(info)
        for name in sorted(tensors.keys() - self.expected.keys()):
            raise HttpError("WeightMismatch", f"{name} is no tensor of this model", name)
        for group in self.names.groups:
            live = self.names.to_checkpoint(group, {name: self.weights[name].detach() for name in group.model})
            for name, weight in zip(group.checkpoint, live, strict=True):
                pulse()
                if name in tensors and not same_bits(weight, tensors[name].to(weight.device, weight.dtype)):
                    raise HttpError("WeightMismatch", f"{name} of the checkpoint is not what this engine holds", name)
        return tensors

    def _compare_records(self, info: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Compare what a checkpoint holds with its manifest, where one was sent."""
        records = {r.name: r for r in self._manifest(info).tensors} if "manifest" in info else {}
        odd = sorted(tensors.keys() ^ records.keys()) if records else ()
        for name in odd:
            how = "was not sent" if name in tensors else "is not in the checkpoint"
            raise HttpError("WeightMismatch", f"{name} {how}", name)
        for name, record in records.items():
            pulse()
            if record_of(name, tensors[name].contiguous(), record.offset) != record:
                raise HttpError("WeightMismatch", f"{name} of the checkpoint is not what was sent", name)

    def _checkpoint(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a Hugging Face checkpoint but for tied ones, compared with its manifest."""
        folder = Path(info["path"])
        tensors: dict[str, torch.Tensor] = {}
        try:
            check_checkpoint(info["path"])
            for path in sorted(set(weight_files(folder).values())):
                with opened(path) as file:
                    for name in file.keys():
                        pulse()
                        tensors[name] = file.get_tensor(name)
        except (CheckpointError, NoPlace, OSError, ValueError) as error:  # a ValueError for a path with a null byte
            why = error.what if isinstance(error, CheckpointError) else str(error)
            raise HttpError("WeightMismatch", f"no checkpoint in {folder}: {why}") from error
        self._compare_records(info, tensors)
        return {name: t for name, t in tensors.items() if name not in self.aliases}

    def _write(self, tensors: dict[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
        """Write all tensors or none; with `exact` they must have the dtype of the model."""
        for name, tensor in tensors.items():
            known = self.expected.get(name)
            if known is None or name in self.delivered:
                problem = "is no tensor of this model" if known is None else "came twice"
                raise HttpError("WeightMismatch", f"{name} {problem}", name)
            weight = known[1]
            if tensor.shape != weight.shape or (exact and tensor.dtype != weight.dtype):
                got, want = ((tuple(t.shape), dtype_name(t.dtype)) for t in (tensor, weight))
                raise HttpError("WeightMismatch", f"{name}: received shape and dtype {got}, the model has {want}", name)
        self.pending |= tensors
        for group in {id(group): group for group, _ in (self.expected[name] for name in tensors)}.values():
            if all(name in self.pending for name in group.checkpoint):
                pulse()
                parts = [self.pending.pop(name) for name in group.checkpoint]
                for name, tensor in self.names.to_model(group, parts).items():
                    self.weights[name].copy_(tensor)
                self.adapter.forget(group.model)
        return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit, also where they are not numbers."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.shape == b.shape and torch.equal(*bits)

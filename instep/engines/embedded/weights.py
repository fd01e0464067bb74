"""The engine's side of a weight sync: sessions that check all bytes before they load them (docs/architecture.md)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from instep.checkpoints.weight_files import weight_files, weight_names
from instep.engines.embedded.adapter import Adapter
from instep.engines.embedded.protocol import HttpError
from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.models.images import IMAGES
from instep.system.processes import pulse
from instep.weights.memory import unlike
from instep.weights.way import OF_ADAPTERS
from instep_engine.manifest import WeightMismatch, digest, dtype_name, tensor_bytes
from instep_engine.receiving import Receiving

FAILED, NOT_STARTED = "the last weight update failed", "no weight update was started: POST /start_weight_update first"


class LiveWeights(Receiving):
    """The live weights by the names of their checkpoint, written in place; tied weights appear once.

    Tensors that form one weight together, such as the experts of a layer, wait in `pending` for the last of them.
    `failure` says why generation is blocked: a session failed, so the parameters may be of two weight versions.
    """

    def __init__(self, model: PreTrainedModel, folder: Path):
        self.weights = named_weights(model)
        super().__init__(next(iter(self.weights.values())).device, pulse)
        self.names = CheckpointNames(model, weight_names(weight_files(folder)))
        self.expected = {
            name: (group, torch.empty(shape, dtype=self.weights[group.model[0]].dtype, device="meta"))
            for group in self.names.groups
            for name, shape in zip(group.checkpoint, group.shapes, strict=True)
        }
        self.aliases = set(model.state_dict()) - set(self.weights)  # tied names
        self.pending: dict[str, torch.Tensor] = {}
        self.version, self.failure = "default", ""
        self.adapter = Adapter(self.weights)

    def start(self, version: str | None, nonce: str | None) -> None:
        self.abandon()
        self.session, self.delivered, self.pending = (version, nonce), set(), {}
        self.adapter.received = {}

    def update(self, info: Any) -> int:
        """Check and load a bucket or checkpoint. Return its number of tensors. A WeightMismatch fails the session."""
        if self.session is None:
            raise HttpError("SessionError", NOT_STARTED)
        before = len(self.delivered)
        try:
            self.receive_weights(info)
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # also an unknown backend
            raise HttpError("BadRequestError", f"update_info is malformed: {error!r}") from error
        except WeightMismatch as error:
            if info["backend"] != "memory":
                self.session = None
                if info["backend"] not in OF_ADAPTERS:  # adapters write nothing before `finish`
                    self.failure = f"{FAILED}: {error.what}"
            raise HttpError("WeightMismatch", error.what, error.tensor) from error
        return len(self.delivered) - before

    def finish(self, version: str | None) -> str:
        """End the session and return the new version. Raises WeightMismatch: a tensor was not delivered."""
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
        """Drop an unfinished session. If it has already written weights, this is a failure."""
        if self.session is not None and self.delivered and not self.adapter.received:
            self.failure = f"{FAILED}: it was not finished"
        self.session = None

    def digests(self) -> dict[str, str]:
        """Return the xxh3-128 of the bytes of each live weight, as in a manifest."""
        digests = {}
        for group in self.names.groups:
            live = {name: self.weights[name].detach() for name in group.model}
            for name, tensor in zip(group.checkpoint, self.names.to_checkpoint(group, live), strict=True):
                pulse()
                digests[name] = digest(tensor_bytes(tensor.cpu()))
        return digests

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], lasting: bool) -> None:
        self.adapter.receive(tensors, config)

    def compare_start(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        tensors = self._of_model(self._own(tensors))
        for name in sorted(tensors.keys() - self.expected.keys()):
            raise WeightMismatch(f"{name} is no tensor of this model", name)
        for group in self.names.groups:
            live = self.names.to_checkpoint(group, {name: self.weights[name].detach() for name in group.model})
            for name, weight in zip(group.checkpoint, live, strict=True):
                pulse()
                told = tensors.get(name)
                if told is not None and (told.shape != weight.shape or unlike(weight, told.to(weight.device))):
                    raise WeightMismatch(f"{name} of the checkpoint is not what this engine holds", name)

    def _own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Leave out what a checkpoint holds beside this model: tied weights again, and layers for images."""
        return {n: tensor for n, tensor in tensors.items() if n not in self.aliases and not n.startswith(IMAGES)}

    def load(self, tensors: dict[str, torch.Tensor], exact: bool) -> Iterable[str]:
        """Write all tensors or none. A checkpoint (not `exact`) may have another dtype, and tied weights twice."""
        if not exact:
            tensors = self._own(tensors)
        delivered, tensors = tensors, self._of_model(tensors)
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
        return delivered

    def _of_model(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors without layers of multi-token prediction: this engine does not draft."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.names.mtp}

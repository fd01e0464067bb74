"""The engine's side of a weight sync: a session that checks every byte before it loads (docs/architecture.md)."""

import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from instep.engines.embedded.protocol import HttpError
from instep.weights.manifest import BucketManifest, TensorRecord, digest, dtype_name, tensor_bytes


def mismatch(message: str, tensor: str | None = None) -> HttpError:
    """What was received is not what the model or the manifest says."""
    return HttpError("WeightMismatch", message, tensor)


class LiveWeights:
    """The parameters that serve, by Hugging Face name; tied weights once. They are written in place.

    `failure` is why nothing may be generated: a session failed, and the parameters may be a mixture.
    """

    def __init__(self, model: torch.nn.Module):
        self.parameters = dict(model.named_parameters())
        self.aliases = set(model.state_dict()) - set(self.parameters)  # tied names, buffers
        self.version, self.failure = "default", ""
        self.session: tuple[str | None, str | None] | None = None  # version, nonce
        self.delivered: set[str] = set()

    def start(self, version: str | None, nonce: str | None) -> None:
        self.abandon()
        self.session, self.delivered = (version, nonce), set()

    def update(self, info: Any) -> int:
        """Check one bucket, then load it; returns the number of its tensors. A WeightMismatch fails the session."""
        if not isinstance(info, dict):
            raise HttpError("BadRequestError", f"update_info must be an object, got {info!r}")
        self._check_started()
        load = {"shm": self._load_bucket, "disk": self._load_checkpoint}.get(str(info.get("backend")))
        if load is None:
            raise HttpError("SessionError", f"unknown backend {info.get('backend')!r}: shm or disk")
        try:
            names = load(info)
        except (KeyError, TypeError) as error:
            raise HttpError("SessionError", f"update_info is malformed: {error!r}") from error
        except HttpError as error:
            self.failure, self.session = f"the last weight update failed: {error}", None
            raise
        self.delivered.update(names)
        return len(names)

    def finish(self, version: str | None) -> str:
        """End the session; returns the new version. WeightMismatch if a tensor of the model was not delivered."""
        started = self._check_started()
        missing = [name for name in self.parameters if name not in self.delivered]
        self.session, self.failure = (
            None,
            f"the last weight update failed: {missing[:3]} not delivered" if missing else "",
        )
        if missing:
            raise mismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0])
        return version or started or self.version

    def abandon(self) -> None:
        """An unfinished session that already wrote is a failure, one that did not is forgotten."""
        if self.session is not None and self.delivered:
            self.failure = "the last weight update failed: it was not finished"
        self.session = None

    def digests(self) -> dict[str, str]:
        """xxh3-128 of the bytes of each live parameter, as in a manifest."""
        return {name: digest(tensor_bytes(p.cpu())) for name, p in self.parameters.items()}

    def _check_started(self) -> str | None:
        if self.session is None:
            raise HttpError("SessionError", "no weight update was started: POST /start_weight_update first")
        return self.session[0]

    def _load_bucket(self, info: dict[str, Any]) -> list[str]:
        manifest = BucketManifest.from_json(info["manifest"])
        names = [record.name for record in manifest.tensors]
        if (got := (manifest.version, manifest.nonce)) != self.session:
            raise mismatch(f"the bucket is of version and nonce {got}, the session of {self.session}", *names[:1])
        try:
            with open(manifest.path, "rb") as file:
                # Private and writable: torch wants writable memory, and a copy would double the bucket.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise mismatch(f"the bucket {manifest.path} cannot be read: {error}", *names[:1]) from error
        with data:
            with memoryview(data) as view:
                parameters = [self._checked(record, view) for record in manifest.tensors]
            for parameter, record in zip(parameters, manifest.tensors, strict=True):
                flat = torch.frombuffer(data, dtype=parameter.dtype, count=parameter.numel(), offset=record.offset)
                parameter.copy_(flat.view(parameter.shape))
                del flat  # or the mapping cannot be closed
        return names

    def _checked(self, record: TensorRecord, view: memoryview) -> torch.Tensor:
        name, parameter = record.name, self.parameters.get(record.name)
        if parameter is None or name in self.delivered:
            raise mismatch(f"{name} {'is no tensor of this model' if parameter is None else 'came twice'}", name)
        want = (tuple(parameter.shape), dtype_name(parameter.dtype), parameter.nbytes)
        if (got := (record.shape, record.dtype, record.nbytes)) != want:
            raise mismatch(f"{name}: received shape, dtype and bytes {got}, the model has {want}", name)
        if not 0 <= record.offset <= len(view) - record.nbytes:
            raise mismatch(f"{name} lies outside the bucket of {len(view)} bytes", name)
        if digest(view[record.offset : record.offset + record.nbytes]) != record.digest:
            raise mismatch(f"{name}: the bytes received do not have the digest of those sent", name)
        self.delivered.add(name)  # before it is loaded, so that one bucket cannot hold it twice
        return parameter

    def _load_checkpoint(self, info: dict[str, Any]) -> list[str]:
        """Load a Hugging Face checkpoint (the golden twin); its dtype may differ, its names and shapes may not."""
        folder, names = Path(info["path"]), []
        try:
            for file in sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
                with safe_open(file, "pt") as tensors:
                    for name in set(tensors.keys()) - self.aliases:
                        shape = tuple(tensors.get_slice(name).get_shape())
                        want = tuple(self.parameters[name].shape) if name in self.parameters else None
                        if shape != want:
                            raise mismatch(f"{name}: {shape} on disk, {want} in the model", name)
                        self.parameters[name].copy_(tensors.get_tensor(name))
                        names.append(name)
        except (OSError, SafetensorError) as error:
            raise mismatch(f"no checkpoint in {folder}: {error}") from error
        return names

"""The engine's side of a weight sync: a session that checks every byte before it loads (docs/architecture.md)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from instep.engines.embedded.protocol import BadRequestError, SessionError, WeightMismatch
from instep.weights.manifest import BucketManifest, TensorRecord, digest, dtype_name, tensor_bytes


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
            raise BadRequestError(f"update_info must be an object, got {info!r}")
        self._started()
        load = {"shm": self._load_bucket, "disk": self._load_checkpoint}.get(str(info.get("backend")))
        try:
            if load is None:
                raise SessionError(f"unknown backend {info.get('backend')!r}: shm or disk")
            names = load(info)
        except (KeyError, TypeError) as error:
            raise SessionError(f"update_info is malformed: {error!r}") from error
        except WeightMismatch as mismatch:
            raise self._failed(mismatch) from None
        self.delivered.update(names)
        return len(names)

    def finish(self, version: str | None) -> str:
        """End the session; returns the new version. WeightMismatch if a tensor of the model was not delivered."""
        started, _ = self._started()
        missing = [name for name in self.parameters if name not in self.delivered]
        if missing:
            raise self._failed(WeightMismatch(f"{len(missing)} tensors were not delivered: {missing[:3]}", missing[0]))
        if version is not None and version != (started or version):
            raise self._failed(WeightMismatch(f"finished as version {version!r}, started as {started!r}"))
        version, self.session, self.failure = version or started or self.version, None, ""
        return version

    def abandon(self) -> None:
        """An unfinished session that already wrote is a failure, one that did not is forgotten."""
        if self.session is not None and self.delivered:
            self.failure = "the last weight update failed: it was not finished"
        self.session = None

    def digests(self) -> dict[str, str]:
        """xxh3-128 of the bytes of each live parameter, as in a manifest."""
        return {name: digest(tensor_bytes(p.cpu())) for name, p in self.parameters.items()}

    def _started(self) -> tuple[str | None, str | None]:
        if self.session is None:
            raise SessionError("no weight update was started: POST /start_weight_update first")
        return self.session

    def _failed(self, mismatch: WeightMismatch) -> WeightMismatch:
        self.failure, self.session = f"the last weight update failed: {mismatch}", None
        return mismatch

    def _load_bucket(self, info: dict[str, Any]) -> list[str]:
        manifest = BucketManifest.from_json(info["manifest"])
        first = manifest.tensors[0].name if manifest.tensors else None
        if (got := (manifest.version, manifest.nonce)) != self.session:
            raise WeightMismatch(f"the bucket is of version and nonce {got}, the session of {self.session}", first)
        try:
            with open(manifest.path, "rb") as file:
                # Private and writable: torch wants writable memory, and a copy would double the bucket.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise WeightMismatch(f"the bucket {manifest.path} cannot be read: {error}", first) from error
        with data:
            with memoryview(data) as view:
                parameters = [self._checked(record, view) for record in manifest.tensors]
            for parameter, record in zip(parameters, manifest.tensors, strict=True):
                flat = torch.frombuffer(data, dtype=parameter.dtype, count=parameter.numel(), offset=record.offset)
                parameter.copy_(flat.view(parameter.shape))
                del flat  # or the mapping cannot be closed
        return [record.name for record in manifest.tensors]

    def _checked(self, record: TensorRecord, view: memoryview) -> torch.Tensor:
        name, parameter = record.name, self.parameters.get(record.name)
        if parameter is None or name in self.delivered:
            raise WeightMismatch(f"{name} {'is no tensor of this model' if parameter is None else 'came twice'}", name)
        want = (tuple(parameter.shape), dtype_name(parameter.dtype), parameter.nbytes)
        if (got := (record.shape, record.dtype, record.nbytes)) != want:
            raise WeightMismatch(f"{name}: received shape, dtype and bytes {got}, the model has {want}", name)
        if not 0 <= record.offset <= len(view) - record.nbytes:
            raise WeightMismatch(f"{name} lies outside the bucket of {len(view)} bytes", name)
        found = digest(view[record.offset : record.offset + record.nbytes])
        if found != record.digest:
            raise WeightMismatch(f"{name}: the bytes received have digest {found}, sent was {record.digest}", name)
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
                            raise WeightMismatch(f"{name}: {shape} on disk, {want} in the model", name)
                        self.parameters[name].copy_(tensors.get_tensor(name))
                        names.append(name)
        except (OSError, SafetensorError) as error:
            raise WeightMismatch(f"no checkpoint in {folder}: {error}") from error
        return names

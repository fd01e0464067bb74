"""The engine's side of a weight sync: a session that checks every byte before it loads (docs/architecture.md)."""

from __future__ import annotations

import json
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from instep.weights.manifest import BucketManifest, TensorRecord, digest, dtype_name, tensor_bytes


class WeightMismatch(Exception):
    """What was received is not what the model or the manifest says. `tensor` names the first such tensor."""

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(message)
        self.tensor = tensor


class SessionError(Exception):
    """A call that does not fit the state of the session."""


@dataclass
class Session:
    version: str | None
    nonce: str | None
    delivered: set[str] = field(default_factory=set)


class LiveWeights:
    """The parameters that serve, by Hugging Face name; tied weights once. They are written in place.

    `failure` is why nothing may be generated: a session failed, and the parameters may be a mixture.
    """

    def __init__(self, model: torch.nn.Module, version: str = "default"):
        self.parameters = dict(model.named_parameters())
        self.aliases = set(model.state_dict()) - set(self.parameters)  # tied names, buffers
        self.version, self.failure = version, None
        self.session: Session | None = None

    def start(self, version: str | None, nonce: str | None) -> None:
        if self.session is not None and self.session.delivered:
            self.failure = "a weight update was started anew before it was finished"
        self.session = Session(version, nonce)

    def update(self, info: dict[str, Any]) -> int:
        """Check one bucket, then load it; returns the number of its tensors.

        Raises:
            SessionError: no session, or an unknown backend.
            WeightMismatch: and the session has failed.
        """
        session = self._session()
        try:
            if info.get("backend") == "shm":
                names = self._load_bucket(BucketManifest.from_json(info["manifest"]), session)
            elif info.get("backend") == "disk":
                names = self._load_checkpoint(Path(info["path"]))
            else:
                raise SessionError(f"unknown backend {info.get('backend')!r}: shm or disk")
        except (KeyError, TypeError) as error:
            raise SessionError(f"update_info is malformed: {error!r}") from error
        except WeightMismatch as mismatch:
            self._fail(mismatch)
            raise
        session.delivered.update(names)
        return len(names)

    def finish(self, version: str | None) -> str:
        """End the session; returns the new version.

        Raises:
            WeightMismatch: a tensor of the model was not delivered, or the version is not the session's.
        """
        session = self._session()
        missing = [name for name in self.parameters if name not in session.delivered]
        mismatch = None
        if missing:
            mismatch = WeightMismatch(f"{len(missing)} tensors were not delivered, {missing[0]} first", missing[0])
        elif None not in (version, session.version) and version != session.version:
            mismatch = WeightMismatch(f"finished as version {version!r}, started as {session.version!r}")
        if mismatch is not None:
            self._fail(mismatch)
            raise mismatch
        self.session = self.failure = None
        return version or session.version or self.version

    def abandon(self) -> None:
        """Serving goes on: an unfinished session that already wrote is a failure, one that did not is forgotten."""
        if self.session is not None and self.session.delivered:
            self._fail(WeightMismatch("a weight update was not finished"))
        self.session = None

    def digests(self) -> dict[str, str]:
        """xxh3-128 of the bytes of each live parameter, as in a manifest."""
        return {name: digest(tensor_bytes(p.cpu())) for name, p in self.parameters.items()}

    def _session(self) -> Session:
        if self.session is None:
            raise SessionError("no weight update was started: POST /start_weight_update first")
        return self.session

    def _fail(self, mismatch: WeightMismatch) -> None:
        self.failure, self.session = f"the last weight update failed: {mismatch}", None

    def _load_bucket(self, manifest: BucketManifest, session: Session) -> list[str]:
        first = manifest.tensors[0].name if manifest.tensors else None
        if manifest.nonce != session.nonce or manifest.version != session.version:
            got, want = (manifest.version, manifest.nonce), (session.version, session.nonce)
            raise WeightMismatch(f"bucket is of version and nonce {got}, the session of {want}", first)
        # A private writable mapping: torch wants writable memory, and a copy would double the bucket.
        with _open_own(manifest.path, first) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            with memoryview(data) as view:
                parameters = [self._checked(record, session, view) for record in manifest.tensors]
            for parameter, record in zip(parameters, manifest.tensors, strict=True):
                flat = torch.frombuffer(data, dtype=parameter.dtype, count=parameter.numel(), offset=record.offset)
                parameter.data.copy_(flat.view(parameter.shape))
                del flat  # or the mapping cannot be closed
        return [record.name for record in manifest.tensors]

    def _checked(self, record: TensorRecord, session: Session, view: memoryview) -> torch.Tensor:
        name, parameter = record.name, self.parameters.get(record.name)
        if parameter is None:
            raise WeightMismatch(f"{name} is no tensor of this model", name)
        want = (tuple(parameter.shape), dtype_name(parameter.dtype), parameter.nbytes)
        got = (record.shape, record.dtype, record.nbytes)
        if got != want:
            raise WeightMismatch(f"{name}: received shape, dtype and bytes {got}, the model has {want}", name)
        if name in session.delivered:
            raise WeightMismatch(f"{name} was delivered twice", name)
        if record.offset < 0 or record.offset + record.nbytes > len(view):
            raise WeightMismatch(f"{name} lies outside the bucket of {len(view)} bytes", name)
        found = digest(view[record.offset : record.offset + record.nbytes])
        if found != record.digest:
            raise WeightMismatch(f"{name}: the bytes received have digest {found}, sent was {record.digest}", name)
        return parameter

    def _load_checkpoint(self, folder: Path) -> list[str]:
        """Load a Hugging Face checkpoint (the golden twin); its dtype may be another one, its names and shapes not."""
        index = folder / "model.safetensors.index.json"
        try:
            files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
            names = []
            for file in sorted(files):
                with safe_open(folder / file, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a dict)
                        if name in self.aliases:
                            continue
                        parameter, shape = self.parameters.get(name), tuple(tensors.get_slice(name).get_shape())
                        if parameter is None:
                            raise WeightMismatch(f"{name} is no tensor of this model", name)
                        if shape != tuple(parameter.shape):
                            raise WeightMismatch(f"{name}: {shape} on disk, {tuple(parameter.shape)} in the model", name)
                        parameter.data.copy_(tensors.get_tensor(name))
                        names.append(name)
        except (OSError, SafetensorError) as error:
            raise WeightMismatch(f"no checkpoint in {folder}: {error}") from error
        return names


def _open_own(path: str, tensor: str | None) -> Any:
    """The bucket's file, which must be a plain, non-empty one of this user's."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise WeightMismatch(f"the bucket cannot be opened: {error}", tensor) from error
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not status.st_size:
        file.close()
        raise WeightMismatch(f"{path} is no plain file of this user with bytes in it", tensor)
    return file

"""The way `shm`: weights travel as buckets in shared memory.

Only the ranks that get full tensors write; the others take part in gathering them. A full bucket is delivered at once,
so engines load one while the next is gathered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from instep.errors import SyncError
from instep.system.run_context import RunThreads
from instep.weights.source import WeightSource
from instep.weights.way import Carriage, Order, Sent
from instep_engine.manifest import DIGEST_KIND, BucketManifest, TensorRecord, record_of, tensor_bytes, tensor_digest


class Shm:
    digest_kind, digest = DIGEST_KIND, staticmethod(tensor_digest)
    name = "shm"
    keeps = False  # whether the files of buckets outlive their session

    def send(self, source: WeightSource, order: Order, emit: Callable[[BucketManifest], None]) -> None:
        """Write all weights as buckets of about `order.bucket_bytes` into `order.folder`, and emit their manifests.

        Raises:
            SyncError: there is no room for a bucket.
        """
        records: list[TensorRecord] = []
        parts: list[torch.Tensor] = []
        offset = num_buckets = 0

        def flush() -> None:
            nonlocal records, parts, offset, num_buckets
            path = order.folder / f"{order.nonce}-{num_buckets}.bin"
            _write(path, parts, offset)
            emit(BucketManifest(str(path), order.version, order.nonce, tuple(records)))
            num_buckets += 1
            records, parts, offset = [], [], 0

        for spec, tensor in source:
            if tensor is None:
                continue
            part = tensor.detach().to("cpu", copy=True).contiguous()  # a copy: a tensor is valid until the next
            records.append(record_of(spec.name, part, offset))
            parts.append(part)
            offset += records[-1].nbytes
            if offset >= order.bucket_bytes:
                flush()
        if records:
            flush()

    def drive(self, carriage: Carriage) -> Sent:
        """Deliver each bucket as soon as it is written, while the workers gather the next."""
        tensors: list[TensorRecord] = []
        loads: list[Future[None]] = []
        paths: list[Path] = []

        def load(manifest: BucketManifest) -> None:
            try:
                if not any(earlier.done() and earlier.exception() for earlier in loads):  # else the session is over
                    carriage.deliver({"backend": self.name, "manifest": manifest.to_json()})
            finally:
                if not self.keeps:
                    Path(manifest.path).unlink(missing_ok=True)

        def on_event(manifest: BucketManifest) -> None:
            tensors.extend(manifest.tensors)
            paths.append(Path(manifest.path))
            loads.append(pool.submit(load, manifest))

        pool = RunThreads(1)  # buckets in order
        try:
            carriage.publish(carriage.memory_folder, on_event)
            for future in loads:
                future.result(timeout=carriage.seconds_left())
        except TimeoutError:
            carriage.seconds_left()  # the time is over, so this raises
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an engine that hangs must not delay the end
            for path in () if self.keeps else paths:  # of buckets that were not delivered
                path.unlink(missing_ok=True)
        return Sent(tuple(tensors), self.digest_kind)


WAY = Shm()


def _write(path: Path, parts: list[torch.Tensor], num_bytes: int) -> None:
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "wb") as file:
            for part in parts:
                file.write(tensor_bytes(part))
    except OSError as error:
        raise SyncError(
            f"a bucket of {num_bytes / 1e6:,.1f} MB does not fit into shared memory: {error.strerror}",
            where=str(path),
            remedy="enlarge /dev/shm (docker: --shm-size), lower --update-weight-buffer-size or use --weight-sync disk",
        ) from error

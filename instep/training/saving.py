"""How a backend saves with `torch.distributed.checkpoint`: at once or, with --async-save, in a thread.

With --async-save the ranks plan the save together, as always, and each copies its tensors to host memory. Then training
continues, and a thread of each rank writes the same files as without the flag. It needs no other rank, except that the
first rank lists all files in `.metadata`. So ranks report to each other by files (`save_markers.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from instep.checkpoints.integrity import digests_of_rank
from instep.checkpoints.save_markers import tell_written, wait_written
from instep.weights.parking import HostCopies


class Saver:
    """Saves the state of this rank's model and optimizer.

    Args:
        in_background: with --async-save.
    """

    def __init__(self, device: torch.device, in_background: bool = False):
        self._device, self._in_background = device, in_background
        self._copies = HostCopies(device, "--async-save", "a run without --async-save")
        self._own: set[int] = set()  # storages on the host that no one else writes to
        self._snapshot: _Snapshot | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor made for this save, on the host; it is complete when `save` returns."""
        host = self._copies.copy(tensor) if self._in_background and tensor.is_cuda else tensor.cpu()
        self._own.add(host.untyped_storage().data_ptr())
        return host

    def save(self, state: dict[str, Any], path: Path, planner: dcp.SavePlanner | None = None) -> None:
        """Write `state` into the folder `path`, or copy it for `finish`; collective.

        Raises:
            OSError, CheckpointException: a rank could not write.
        """
        self._copies.wait()  # the copies of `to_host`: a planner may read them
        writer = _Snapshot(path, self._keep) if self._in_background else _Writer(path)
        dcp.save(state, storage_writer=writer, planner=planner)
        self._own.clear()
        if isinstance(writer, _Snapshot):
            self._copies.wait()
            self._snapshot = writer

    def _keep(self, tensor: Tensor) -> Tensor:
        own = tensor.untyped_storage().data_ptr() in self._own
        return tensor if own else self._copies.copy(tensor.detach())

    def finish(self, path: Path, rank: int, num_ranks: int, timeout: float) -> dict[str, str]:
        """Finish `save`. Return the digests of the files that this rank has written into `path`, by name.

        With --async-save a thread starts to write the copies, within `timeout` seconds. Then there are no digests yet:
        `wait_written` has them when the files are on the disk.
        """
        if not self._in_background:
            return digests_of_rank(path, rank)
        args = (self._snapshot, path, rank, num_ranks, time.monotonic() + timeout)
        self._snapshot = None
        threading.Thread(target=self._write, args=args, name="checkpoint", daemon=True).start()
        return {}

    def _write(self, snapshot: _Snapshot, path: Path, rank: int, num_ranks: int, deadline: float) -> None:
        try:
            with self._beside():
                results = snapshot.write()
            self._copies.clear()
            news: dict[str, Any] = {"digests": digests_of_rank(path, rank)}
            if rank:
                news["files"] = [_to_json(result) for result in results]
            else:
                others = wait_written(path, range(1, num_ranks), deadline)
                lists = [[_from_json(entry) for entry in others[r]["files"]] for r in sorted(others)]
                snapshot.list_files([results, *lists])
        except Exception as error:  # noqa: BLE001 - the border of this thread: it becomes an error of the run
            traceback.print_exc()  # into the log of the rank
            for part in path.glob(f"__{rank}_*"):
                with contextlib.suppress(OSError):
                    part.unlink()  # free space for the next steps
            news = {"error": getattr(error, "what", None) or f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):  # the folder is missing: the run has ended
            tell_written(path, rank, **news)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run torch's writer, which waits for its stream, on a stream without computations."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)  # for this thread
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield


class _Writer(dcp.FileSystemWriter):
    """torch's writer; its `.metadata` does not say whether a tensor was in pinned memory, as copies are."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties.pin_memory = False
        super().finish(metadata, results)


class _Snapshot(_Writer):
    """torch's writer of a rank's files; it copies its data now and writes them later."""

    def __init__(self, path: Path, keep: Any):
        super().__init__(path)
        self._keep = keep
        self._data: dict[MetadataIndex, Any] = {}
        self._metadata: Metadata | None = None  # on the first rank

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        self._plan = plan
        for item in plan.items:
            data = planner.resolve_data(item)
            self._data[item.index] = self._keep(data) if isinstance(data, Tensor) else data
        nothing_yet: Future[list[WriteResult]] = Future()
        nothing_yet.set_result([])
        return nothing_yet

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        results: list[WriteResult] = super().write_data(self._plan, self).wait()  # type: ignore[arg-type]
        self._data.clear()
        return results

    def resolve_data(self, item: Any) -> Any:
        """Return the data of an item to `write_data`, like the planner."""
        return self._data[item.index]

    def list_files(self, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, on the first rank."""
        assert self._metadata is not None
        super().finish(self._metadata, results)


def _to_json(result: WriteResult) -> list[Any]:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, place.relative_path, place.offset, place.length]


def _from_json(entry: list[Any]) -> WriteResult:
    fqn, offset, index, *place = entry
    return WriteResult(MetadataIndex(fqn, offset, index), place[2], _StorageInfo(*place))

"""Read checkpoints as data: a checkpoint from an untrusted source cannot run code here.

The index `.metadata` of a distributed checkpoint is a pickle. It is read once, as data (`safe_pickle.py`), and torch's
`Metadata` is made from it. torch itself reads no index and no entry.
"""

from __future__ import annotations

import os
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from instep.checkpoints.safe_pickle import MAX_NAME, Made, NoData, read
from instep.checkpoints.torch_files import TensorFiles, load_data
from instep.errors import CheckpointError
from instep.system.documents import open_regular

METADATA = ".metadata"
MAX_BYTES = 512 * 2**20  # of an index; an index of a million chunks has 160 MB

# ---- the index of a distributed checkpoint ---------------------------------------------------------------------------


def read_index(folder: Path) -> Metadata:
    """Read the index of the distributed checkpoint `folder`, and check that its files exist with the lengths in it.

    The result is what a reader needs: where tensors are stored in the files, without the writers' plans.

    Raises:
        CheckpointError: the index is missing or damaged, or a file is missing.
    """
    index = folder / METADATA
    try:
        with open_regular(index) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise NoData(f"it has {size:,} bytes, more than {MAX_BYTES:,}")
            found = _metadata(read(file.read()))
    except OSError as error:
        what = f"{METADATA} cannot be read: {error.strerror or error}"
        raise CheckpointError(what, where=str(index), remedy="use another checkpoint") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{METADATA} is not the index of a checkpoint: {error!s:.200}",
            where=str(index),
            remedy="the file is damaged, or made to run code: use another checkpoint",
        ) from error
    _check_files(folder, found)
    return found


def _check_files(folder: Path, index: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in index.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size < end:
            raise CheckpointError(
                f"{name} is {'cut off' if path.is_file() else 'missing'}",
                where=str(folder),
                remedy="copy the checkpoint again, with all its files, or use another one",
            )


def _fields(made: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an instance of the class `name`; another object is an error."""
    if not isinstance(made, Made) or not made.of.endswith((f".{name}", f".MCore{name}")):
        raise NoData(f"there is another object in the place of a {name}")
    return made.state or {}


def _metadata(content: Any) -> Metadata:
    fields = _fields(content, "Metadata")  # Megatron's also has the plans of its ranks
    tensors = {_text(name): _entry(about) for name, about in fields["state_dict_metadata"].items()}
    places = {_index(where): _info(info) for where, info in (fields.get("storage_data") or {}).items()}
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _entry(made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if made.of.endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(made, "TensorStorageMetadata")
    dtype, size = vars(torch)[fields["properties"].state[0].of.removeprefix("torch.")], _size(fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise NoData("a tensor in it has no type")
    chunks = []
    for chunk in fields["chunks"]:
        of_chunk = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(of_chunk["offsets"]), _size(of_chunk["sizes"])
        if any(start + n > whole for start, n, whole in zip(offsets, sizes, size, strict=True)):
            raise NoData("a chunk in it is outside of its tensor")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _size(made: Made) -> torch.Size:
    size = torch.Size(*made.args)
    if made.of != "torch.Size" or min(size, default=0) < 0:
        raise NoData("a shape in it is not a list of numbers")
    return size


def _index(made: Any) -> MetadataIndex:
    fields = _fields(made, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _size(offset), fields.get("index"))


def _info(made: Any) -> _StorageInfo:
    fields = _fields(made, "_StorageInfo")
    name, offset, length = _text(fields["relative_path"]), fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise NoData("its tensors use extensions of torch (compression or encryption), which cannot be read")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise NoData("the place of a tensor in its file is not a pair of numbers")
    if "/" in name or name in ("", ".", ".."):
        raise NoData(f"it names the file {name!r:.80}, which is not in its folder")
    return _StorageInfo(name, offset, length)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_NAME or not value.isprintable():
        raise NoData(f"a name in it is not a text of at most {MAX_NAME} characters")
    return value


def refuse_others(path: Path, index: Metadata, names: set[str]) -> None:
    """Refuse a checkpoint with more weights than the model: torch would silently read only the names that it finds."""
    stored = index.state_dict_metadata
    if others := sorted({name.removeprefix("model.") for name in stored if name.startswith("model.")} - names):
        raise CheckpointError(
            f"{len(others)} of its weights do not belong to the model; the first is {others[0]!r}",
            where=str(path),
            remedy="load it with the model that wrote it: --hf-checkpoint names its config.json",
        )


# ---- tensors of a distributed checkpoint -----------------------------------------------------------------------------


def load_tensors(state: dict[str, Any], folder: Path, index: Metadata) -> None:
    """Read the tensors of `state`, a dict of dicts, in place from `folder`; collective, if there are ranks.

    Raises:
        CheckpointError: one is missing or damaged, has another shape, or is not a tensor.
    """
    remedy = "give a folder that this model saved (--no-load-optim if it has no optimizer)"
    for name, about in index.state_dict_metadata.items():  # torch would not change what no chunk covers
        if isinstance(about, TensorStorageMetadata):
            there = {chunk.offsets: chunk.sizes.numel() for chunk in about.chunks}
            if sum(there.values()) < about.size.numel():
                raise CheckpointError(f"cannot read: no file has all of {name}", where=str(folder), remedy=remedy)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process without ranks
            dcp.load(state, storage_reader=_Reader(folder, index), no_dist=not dist.is_initialized())
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot read: {cause_of(error)}", where=str(folder), remedy=remedy) from error


class _Reader(dcp.FileSystemReader):
    """Passes the checked index to torch, and reads tensors without `torch.load`."""

    def __init__(self, folder: Path, index: Metadata):
        super().__init__(folder)
        self._index, self._files = index, TensorFiles(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, info = item.storage_index.fqn, self._index.storage_data.get(item.storage_index)
            if info is None or item.type is LoadItemType.BYTE_IO:
                raise ValueError(f"{name} is not a tensor, or not in any file")
            stored = self._files.read(info.relative_path, info.offset, info.length)
            part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise ValueError(f"{name} has a part of shape {[*part.shape]} in the place of {[*target.shape]}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def cause_of(error: OSError | CheckpointException) -> BaseException:
    """Return the error of the first rank that failed; the text of a CheckpointException holds all tracebacks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


# ---- random states ---------------------------------------------------------------------------------------------------


def seed_all(seed: int, seed_of_rank: int) -> None:
    """Seed torch equally on all ranks; seed Python's and numpy's generators (for hooks) by rank."""
    random.seed(seed_of_rank)
    np.random.seed(seed_of_rank)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of torch's, Python's and numpy's generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(path: Path) -> None:
    """Restore the result of `random_state` from its file.

    Raises:
        CheckpointError: the file holds something else.
    """
    state = load_data(path)
    try:
        version, words, gauss = state["python"]
        keys, position, *rest = state["numpy"]
        keys = keys.numpy().astype(np.uint32)
        if len(words) != 625 or keys.shape != (624,) or not 0 <= int(position) <= 624:  # numpy would read beyond them
            raise ValueError("a generator's state has another length")
        left, following = struct.unpack_from("<ixxxxQ", state["torch"].numpy().tobytes(), 8)
        if left + following > 625:  # torch would read beyond its 624 words
            raise ValueError("torch's generator is at a place outside of its state")
        random.setstate((version, tuple(map(int, words)), gauss))
        np.random.set_state(("MT19937", keys, int(position), *rest))
        torch.set_rng_state(state["torch"])
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"the random state cannot be read: {error!s:.200}",
            where=str(path),
            remedy="use another checkpoint, or continue with only its weights (--no-load-optim)",
        ) from error

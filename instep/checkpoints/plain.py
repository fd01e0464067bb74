"""Checkpoints hold data only: what may come from a stranger is read without running code that it names.

Pickles name functions to be called. torch's distributed checkpoints have two kinds of them: the index `.metadata`, and
entries that are no tensors; `torch.save` files are a third.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from instep.errors import CheckpointError

METADATA = ".metadata"
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load obeys it also where its caller says weights_only=False
NO_PICKLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError, LookupError)
_CLASSES = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron keeps the plans of all ranks in its index; up to torch 2.2 the properties of tensors were elsewhere.
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",  # of megatron-core 0.15
}
_NAMES = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
}


def _member(owner: object, name: str) -> Enum:
    if not (isinstance(owner, EnumType) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it asks for '{name}' of {owner!r:.80}, which no index needs")
    found: Enum = owner.__members__[name]
    return found


class _Unpickler(pickle.Unpickler):
    """Makes only what an index of a distributed checkpoint is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron.") and name in _CLASSES.get(module, "").split():
            return type(name, (), {})  # Megatron itself is not needed, and not imported
        if (module, name) == ("builtins", "getattr"):
            return _member  # of an enum, which the first releases of Python 3.11 write so
        known = (module, name) in _NAMES or name in _CLASSES.get(module, "").split()
        found = super().find_class(module, name) if known else getattr(torch, name, None) if module == "torch" else None
        if not known and not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return found


def read_index(folder: Path) -> Metadata:
    """The index of the distributed checkpoint `folder`.

    Raises:
        CheckpointError: there is none, or it names something that no index needs.
    """
    index = folder / METADATA
    try:
        with open(index, "rb") as file:
            content = _Unpickler(file).load()
            if not (isinstance(content, Metadata) or type(content).__name__ == "MCoreMetadata"):
                raise pickle.UnpicklingError("it holds something else")
            return content
    except OSError as error:
        raise CheckpointError(
            f"{METADATA} cannot be read: {error.strerror or error}", where=str(index), remedy="take another checkpoint"
        ) from error
    except NO_PICKLE as error:
        raise CheckpointError(
            f"{METADATA} is no index of a checkpoint: {error}",
            where=str(index),
            remedy="the file is damaged, or made to run code: take another checkpoint",
        ) from error


def load_data(path: Path) -> Any:
    """What `torch.save` has put into `path`: tensors (in mapped memory), numbers, texts, lists and dicts.

    Whatever else is in it, such as the arguments of the program that wrote it, becomes an empty `Unknown`; nothing that
    the file names is imported or called.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stands_in = [(type("Unknown", (Unknown,), {}), name) for name in names]
        with torch.serialization.safe_globals(stands_in):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, *NO_PICKLE) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {_why(error)}",
            where=str(path),
            remedy="the file is damaged, or made to run code: take another checkpoint",
        ) from error


class Unknown:
    """Something in a checkpoint that is no data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


@contextmanager
def trusting_no_code(folder: Path) -> Iterator[None]:
    """Read the distributed checkpoint `folder` in this block, without running code that it names.

    Raises:
        CheckpointError: its index is none, or it or a file names something that is no data.
    """
    if others := sorted(folder.glob("__*.metadata")):  # torch would read these in place of a broken index
        raise CheckpointError(
            f"{others[0].name} is an index of one rank alone, which is not read",
            where=str(others[0]),
            remedy="take another checkpoint: instep and Megatron write one index for all ranks",
        )
    if (folder / METADATA).is_file():
        read_index(folder)
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint holds what is no data: {_why(error)}",
            where=str(folder),
            remedy="it would have to run code of the checkpoint: take another one",
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = before


def _why(error: Exception) -> str:
    """The line of torch's message that says what it has met, if there is one."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unsupported" in line), lines[0])


# What an array of numpy's is pickled as: data, too.
_NUMPY = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), _reconstruct]

# ---- random states ---------------------------------------------------------------------------------------------------


def seed_all(seed: int, seed_of_rank: int) -> None:
    """Seed torch alike on all ranks, Python's and numpy's generators (of hooks) by rank."""
    random.seed(seed_of_rank)
    np.random.seed(seed_of_rank)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(path: Path) -> None:
    """Restore what `random_state` has returned, from the file that it was saved in.

    Raises:
        CheckpointError: the file holds something else.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):  # as an earlier instep has saved them
            state = torch.load(path, weights_only=True)
        version, words, gauss = state["python"]
        keys, *rest = state["numpy"][-4:]  # it had the generator's name first
        random.setstate((version, tuple(map(int, words)), gauss))
        np.random.set_state(("MT19937", np.asarray(keys).astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the random state cannot be read: {_why(error)}",
            where=str(path),
            remedy="take another checkpoint, or go on with its weights alone (--no-load-optim)",
        ) from error


def cause_of(error: OSError | CheckpointException) -> BaseException:
    """The error of the first rank that failed; the text of a CheckpointException holds all tracebacks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def refuse_others(path: Path, names: set[str]) -> None:
    """Refuse a checkpoint that has further weights: torch would read those of the names that there are, silently."""
    stored = read_index(path).state_dict_metadata if (path / METADATA).is_file() else {}
    if others := sorted({name.removeprefix("model.") for name in stored if name.startswith("model.")} - names):
        raise CheckpointError(
            f"{len(others)} of its weights are not the model's, the first {others[0]!r}",
            where=str(path),
            remedy="load it with the model that wrote it: --hf-checkpoint names its config.json",
        )

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instep.errors import CheckpointError

METADATA = ".metadata"
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load obeys it also where its caller says weights_only=False
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
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


class _Unpickler(pickle.Unpickler):
    """Makes only what an index of a distributed checkpoint is made of."""

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module in _MODULES and "." not in name or (module, name) in _NAMES:
            found = super().find_class(module, name)
            allowed = (module, name) in _NAMES or (isinstance(found, type) and found.__module__ == module)
        elif module == "torch":
            found = getattr(torch, name, None)
            allowed = isinstance(found, torch.dtype)
        else:
            allowed = False
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return found


@contextmanager
def trusting_no_code(folder: Path) -> Iterator[None]:
    """Read the distributed checkpoint `folder` in this block, without running code that it names.

    Raises:
        CheckpointError: its index names something that is no data, or is no index.
    """
    index = folder / METADATA
    if index.is_file():
        try:
            with open(index, "rb") as file:
                _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{METADATA} is no index of a checkpoint: {error}",
                where=str(index),
                remedy="the file is damaged, or made to run code: take another checkpoint",
            ) from error
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = before


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
        state = torch.load(path, weights_only=True)
        version, words, gauss = state["python"]
        keys, *rest = state["numpy"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the random state cannot be read: {str(error).splitlines()[0]}",
            where=str(path),
            remedy="take another checkpoint, or go on with its weights alone (--no-load-optim)",
        ) from error

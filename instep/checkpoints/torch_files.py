"""Read files of `torch.save`; nothing that a file names is imported or called."""

from __future__ import annotations

import mmap
import os
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from instep.checkpoints.safe_pickle import DAMAGED, class_for
from instep.errors import CheckpointError
from instep.system.documents import open_regular

AHEAD_BYTES = 8 * 2**20  # the kernel reads so much beyond a tensor that is read
# torch fills only these two classes of containers.
_FILLED: dict[str, Callable[..., Any]] = {
    "collections.defaultdict": lambda *_: OrderedDict[Any, Any](),
    "collections.deque": lambda *_: list[Any](),
}
_DAMAGED = (*DAMAGED, OSError, RuntimeError, struct.error)


def load_plain(path: Path) -> dict[Any, Any]:
    """Return the dict that `torch.save` has written to `path`: tensors (in mapped memory), numbers, texts, lists,
    dicts.

    Raises:
        CheckpointError: the file is missing or damaged, or holds something else.
    """
    try:
        open_regular(path).close()  # a read of a pipe would wait
        content = _load(path, map_location="cpu", mmap=True)
        if not isinstance(content, dict):
            raise ValueError("it is not a dict")
        return content
    except _DAMAGED as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {_cause(error)}",
            where=str(path),
            remedy="the file is damaged, or made to run code: use another checkpoint",
        ) from error


def load_data(path: Path) -> dict[Any, Any]:
    """Read as `load_plain`. Other objects, such as the arguments of the writing program, become a `Made`.

    A `defaultdict` becomes a dict and a `deque` a list. Other subclasses of them that hold something are refused.
    """
    try:
        open_regular(path).close()
        classes = [(_FILLED.get(name) or class_for(name), name) for name in get_unsafe_globals_in_checkpoint(path)]
    except _DAMAGED:
        classes = []  # the except below reports what is wrong with it
    with safe_globals(classes):  # type: ignore[arg-type]
        return load_plain(path)


class TensorFiles:
    """The tensors in files of the folder `folder`, each a separate archive within the file."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped = lru_cache(8)(self._map)
        self.read: Callable[[str, int, int], Tensor] = lru_cache(1)(self._read)  # a fused parameter is read in parts

    def _map(self, name: str) -> mmap.mmap:
        with open_regular(self._folder / name) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _read(self, name: str, offset: int, length: int) -> Tensor:
        """Return the tensor, in mapped memory: only the parts in use are read from the file.

        Raises ValueError if the tensor is missing or incomplete.
        """
        try:
            with open_regular(self._folder / name) as file:
                os.posix_fadvise(file.fileno(), offset, length + AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                view = _create_file_view(file, offset, length)
                about = _load(view, map_location="meta")  # its layout in its storage
            if not about.numel():
                return torch.empty(about.shape, dtype=about.dtype)
            storage = about.untyped_storage()
            count, start = storage.nbytes() // about.itemsize, offset + storage._checkpoint_offset
            flat = torch.frombuffer(self._mapped(name), dtype=about.dtype, count=count, offset=start)
            return flat.as_strided(about.shape, about.stride(), about.storage_offset())
        except _DAMAGED as error:
            raise ValueError(f"{name} holds no tensor at byte {offset}: {_cause(error)}") from error


def _load(file: Any, **options: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of other pickle protocols
        return torch.load(file, weights_only=True, **options)


def _cause(error: BaseException) -> str:
    """Return what is wrong, without torch's advice to load the file with pickle."""
    said = getattr(error, "strerror", None) or str(error)
    return said.rpartition("WeightsUnpickler error: ")[2].strip()[:200]

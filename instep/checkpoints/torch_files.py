"""Reads what `torch.save` has written, without torch's reader: an archive of a pickle (`data.pkl`) and of storages.

The archive is a zip file of stored records. Its pickle is read as data (`inert.py`); tensors are made here, over mapped
memory, so that the kernel can drop what it has read.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Callable
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.checkpoints.inert import (
    MAX_BYTES,
    MAX_DIMENSIONS,
    MAX_SIZE,
    Name,
    NoData,
    Ours,
    check_plain,
    check_size,
    read,
)
from instep.documents import open_regular
from instep.errors import CheckpointError

AHEAD_BYTES = 8 * 2**20  # which the kernel reads beyond a tensor that is asked for
MAX_DIRECTORY = 16 * 2**20  # bytes of a list of records, 300,000 of them
OF_ONE = 2**17  # the same for one tensor in .distcp, and for its pickle: an index may name it many times
MAX_TENSORS = 10**6  # of an archive: each takes a kilobyte, and three opcodes make another one of the same storage
DTYPES = {
    name: getattr(torch, name)
    for name in "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128".split()
}
_TYPED = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip
_READ = (NoData, OSError, zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError)


class _Storage(NamedTuple):
    """Where in the mapped file it lies; `dtype` is None of one that says nothing about it."""

    dtype: torch.dtype | None
    start: int
    num_bytes: int


def load_data(path: Path) -> dict[Any, Any]:
    """The dict that `torch.save` has put into `path`: tensors (in mapped memory), numbers, texts, lists and dicts.

    Whatever else is in it, such as the arguments of the program that wrote it, is a `Made`; nothing that the file names
    is imported or called.

    Raises:
        CheckpointError: the file is missing or damaged, or holds no dict.
    """
    try:
        data = _mapped(path)
        content = read_archive(data, 0, len(data))
        if type(content) is not dict:
            raise NoData("it holds no dict")
        return content
    except _READ as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="the file is damaged, or made to run code: take another checkpoint",
        ) from error


def load_plain(path: Path) -> dict[Any, Any]:
    """As `load_data`, for a file that holds nothing but plain values and tensors.

    Raises:
        CheckpointError: as `load_data`; or it holds something else, or is nested without end.
    """
    content = load_data(path)
    try:
        check_plain(content)
    except NoData as error:
        remedy = "take another file: this one is damaged, or made to run code"
        raise CheckpointError(f"{path.name} cannot be read: {error}", where=str(path), remedy=remedy) from error
    return content


class TensorFiles:
    """The tensors in files of the folder `folder`, each an archive of its own within the file."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped = lru_cache(8)(_mapped)
        self.read: Callable[[str, int, int], Tensor] = lru_cache(1)(self._read)  # a fused parameter is read in parts

    def _read(self, name: str, offset: int, length: int) -> Tensor:
        """Raises ValueError: there is no tensor, or not all of it."""
        path = self._folder / name
        try:
            data = self._mapped(path)
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), offset, length + AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            tensor = read_archive(data, offset, length, OF_ONE, OF_ONE)
        except _READ as error:
            raise ValueError(f"{name} holds no tensor at byte {offset}: {error}") from error
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} holds no tensor at byte {offset}")
        return tensor


def _mapped(path: Path) -> mmap.mmap:
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_archive(
    data: mmap.mmap, offset: int, length: int, directory: int = MAX_DIRECTORY, pickle: int = MAX_BYTES
) -> Any:
    """The value in the archive that is `length` bytes at `offset` of `data`. Raises what is in `_READ`.

    Args:
        directory: the most bytes of its list of records.
        pickle: the most bytes of its pickle.
    """
    view = _View(data, offset, length, directory)
    records = zipfile.ZipFile(view, "r")  # type: ignore[call-overload]  # of a file it needs these methods alone
    by_name = {info.filename: info for info in records.infolist()}
    pickles = [name for name in by_name if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise NoData("it is no archive of torch.save")
    prefix = pickles[0].removesuffix("data.pkl")

    def place(name: str) -> tuple[int, int]:
        if (info := by_name.get(prefix + name)) is None:
            raise NoData(f"it has no record {name!r:.40}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise NoData(f"its record {name!r:.40} is compressed")
        head = view.at(info.header_offset, 30)
        start = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        if info.file_size > length - start:
            raise NoData(f"its record {name!r:.40} is cut off")
        return offset + start, info.file_size

    def storage(where: Any) -> _Storage:
        if type(where) is not tuple or len(where) != 5 or type(where[2]) is not str:
            raise NoData("it names something outside of it that is no storage")
        kind, number = where[1], where[4]
        start, num_bytes = place(f"data/{where[2]}")
        dtype = kind if isinstance(kind, torch.dtype) else None
        if dtype is None and not (type(kind) is Name and kind.name == "UntypedStorage"):
            raise NoData("a storage in it is of an unknown type")
        if type(number) is not int or not 0 <= number * (dtype.itemsize if dtype else 1) <= num_bytes:
            raise NoData("a storage in it is larger than its record")
        return _Storage(dtype, start, num_bytes)

    encoded: dict[str, bytes] = {}
    tensors = repeat(None, MAX_TENSORS)

    def tensor(args: tuple[Any, ...], types: tuple[Any, ...], bits: tuple[Any, ...]) -> Tensor:
        if next(tensors, True):
            raise NoData(f"it has more than {MAX_TENSORS:,} tensors")
        return _tensor(data, args, types, bits)

    functions = {  # after storage, offset, shape and strides: requires_grad, hooks, in v3 the type, and bits
        ("torch._utils", "_rebuild_tensor_v2"): lambda args: tensor(args[:4], (), args[6:]),
        ("torch._utils", "_rebuild_tensor_v3"): lambda args: tensor(args[:4], args[6:7], args[7:]),
        ("_codecs", "encode"): lambda args: _bytes(args, encoded),
        **_FUNCTIONS,
    }

    def names(module: str, name: str) -> Any:
        if (module, name) in functions:
            return Ours(functions[module, name])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module == "torch" and name.removesuffix("Storage") in _TYPED:
            return _TYPED[name.removesuffix("Storage")]
        return Name(module, name)

    if "byteorder" in {name.removeprefix(prefix) for name in by_name}:
        start, size = place("byteorder")
        if data[start : start + min(size, 9)] != b"little":
            raise NoData("it was written on a machine with another order of bytes")
    start, size = place("data.pkl")
    check_size(size, pickle)
    return read(data[start : start + size], names, storage)


def _tensor(data: mmap.mmap, args: tuple[Any, ...], types: tuple[Any, ...], bits: tuple[Any, ...]) -> Tensor:
    """What torch.save has written as a storage, an offset, a shape and strides."""
    storage, first, sizes, stride = args if len(args) == 4 else (None,) * 4
    if type(storage) is not _Storage or type(sizes) is not tuple or type(stride) is not tuple:
        raise NoData("a tensor in it is none")
    dtype = types[0] if types else storage.dtype
    if not isinstance(dtype, torch.dtype) or len(sizes) != len(stride) or len(sizes) > MAX_DIMENSIONS:
        raise NoData("a tensor in it is none")
    if any(bit is not None and not (type(bit) is dict and not bit) for bit in bits):
        raise NoData("a tensor in it is to be conjugated or negated")
    if not all(type(n) is int and 0 <= n < MAX_SIZE for n in (first, *sizes, *stride)):
        raise NoData("a tensor in it has an impossible shape")
    count, numel, last = storage.num_bytes // dtype.itemsize, 1, first
    for n, step in zip(sizes, stride, strict=True):
        numel, last = numel * n, last + (n - 1) * step
    if numel == 0:
        return torch.empty(sizes, dtype=dtype)
    if last >= count or numel > count:  # one that repeats its elements may ask for any memory when it is copied
        raise NoData("a tensor in it is larger than its storage")
    return torch.frombuffer(data, dtype=dtype, count=count, offset=storage.start).as_strided(sizes, stride, first)


def _bytes(args: tuple[Any, ...], done: dict[str, bytes]) -> bytes:
    """As protocol 2 writes them: a text in Latin 1. A text that is named often is made bytes once."""
    if list(map(type, args)) != [str, str] or args[1] != "latin1":
        raise NoData("bytes in it are none")
    try:
        if args[0] not in done:
            done[args[0]] = args[0].encode("latin1")
    except UnicodeEncodeError as error:
        raise NoData("bytes in it are none") from error
    return done[args[0]]


def _size(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(args) != 1 or type(args[0]) is not tuple:
        raise NoData("a shape in it is none")
    return args[0]


def _parameter(args: tuple[Any, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise NoData("a parameter in it is none")
    return args[0]


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    if args:
        raise NoData("a dict in it is none")
    return {}


_FUNCTIONS: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _ordered,
}


class _View:
    """A part of a mapped file, as a file of its own, for zipfile."""

    def __init__(self, data: mmap.mmap, offset: int, length: int, most: int):
        if not 0 <= offset <= offset + length <= len(data):
            raise NoData("it lies outside of its file")
        self._data, self._offset, self._length, self._at, self._most = data, offset, length, 0, most

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError("it begins before the file")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > self._most:
            raise NoData(f"its list of records has more than {self._most:,} bytes")
        out = self.at(self._at, size)
        self._at += size
        return out

    def at(self, start: int, size: int) -> bytes:
        if not 0 <= start <= start + size <= self._length:
            raise NoData("it is cut off")
        return self._data[self._offset + start : self._offset + start + size]

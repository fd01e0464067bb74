"""The index of a data file that is too large for the memory: where its usable rows begin.

It is built when the file is first read. This takes as long as checking, rendering and counting the tokens of all rows.
It stays in a cache while file, flags and tokenizer do not change. The rows stay in the file. A single row of a parquet
file cannot be read alone, so its rows are unpacked into the cache as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from instep.data.rows import BadRows, RawRow, parse_path, place, unreadable
from instep.errors import DataError, writing
from instep.system.atomic import write_text

LARGE = {".jsonl": 64 << 20, ".json": 64 << 20, ".parquet": 16 << 20}  # bytes; below, rows are held in memory
FORMAT = 3  # of the cache, and of the definition of a usable row
INDEX, PLACES, ROWS = "index", "places", "rows.jsonl"  # the files: digest and `Found`, places of rows, unpacked rows
TELL_SECONDS = 30.0
BUILD_SECONDS = 4 * 3600.0  # the longest wait for another process that builds the same index
_PLACE = struct.Struct("<qq")  # where a row begins, and its number
Chunks = Callable[["Found"], Iterator[list[tuple[RawRow, bytes, Any]]]]


@dataclass
class Found:
    """The contents of a file: rows that are used, rows left out; `digest` is of the content of all usable rows.

    `num_bytes` counts the rows that were unpacked into the cache.
    """

    num_rows: int = 0
    num_too_long: int = 0
    num_bytes: int = 0
    bad_rows: BadRows = field(default_factory=BadRows)
    digest: str = ""


def is_large(path_spec: str) -> bool:
    path, _ = parse_path(path_spec)
    return path.is_file() and path.stat().st_size >= LARGE.get(path.suffix, sys.maxsize)


def num_indexed(path_spec: str, checked: Any, cache_path: str | None) -> int | None:
    """Return the usable rows of a file of any length, from an existing index; None without one.

    Args:
        checked: the settings that decide, with the file, whether a row is usable.
    """
    if not is_large(path_spec):
        return None
    folders = cache_folder(cache_path).glob(f"{_name(path_spec, checked)}-*")
    found = next(filter(None, map(_found, folders)), None)
    return None if found is None else found.num_rows + found.num_too_long


class Index(Sequence[Any]):
    """The rows of a large file, each read on request. All methods may be called from several threads.

    Raises:
        DataError: the file was changed while it was read.
    """

    def __init__(self, path: Path, folder: Path, found: Found, record_of: Callable[[bytes, str], Any]):
        self.path, self.found, self._record_of = path, found, record_of
        try:
            self._places = open(folder / PLACES, "rb")
            self._rows = open(path if path.suffix == ".jsonl" else folder / ROWS, "rb")
        except OSError as error:
            raise unreadable(path, error) from error
        self._stat = _identity(os.fstat(self._rows.fileno()))
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        path_spec: str,
        checked: Any,
        kept: Any,
        cache_path: str | None,
        chunks: Chunks,
        record_of: Callable[[bytes, str], Any],
    ) -> Index:
        """Return the index of a file, from the cache if it is there.

        Args:
            checked: the settings that decide, with the file, whether a row is usable.
            kept: the settings that decide which usable rows are left out.
            chunks: reads the file, yields rows that are used in chunks, and fills a `Found`.
            cache_path: the folder of indices; None: one in the user's cache folder.
            record_of: returns the record of a JSON row with file and line.

        Raises:
            OutputError: the cache cannot be written.
            ConfigError, DataError: as `chunks`.
        """
        path, _ = parse_path(path_spec)
        name = _name(path_spec, checked, kept)
        folder = cache_folder(cache_path) / name
        with writing(folder, "--data-cache-path"), _locked(folder):
            found = _found(folder)
            index = cls(path, folder, found or _build(path, folder, chunks), record_of)
            if _name(path_spec, checked, kept) != name:  # to build it, or to wait for that, takes long
                raise _changed(path)
            if found is None:
                _keep(folder, index.found)
            return index

    def __len__(self) -> int:
        return self.found.num_rows

    def __getitem__(self, i: Any) -> Any:
        """Return the record of row `i`, read and made on request."""
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        i = range(len(self))[i]
        try:
            with self._lock:
                self._places.seek(i * _PLACE.size)
                offset, number = _PLACE.unpack(self._places.read(_PLACE.size))
                self._rows.seek(offset)
                line = self._rows.readline()
                now = _identity(os.fstat(self._rows.fileno()))
        except OSError as error:
            raise unreadable(self.path, error) from error
        if now != self._stat:
            raise _changed(self.path)
        return self._record_of(line, place(self.path, number))


def _build(path: Path, folder: Path, chunks: Chunks) -> Found:
    size = path.stat().st_size / 1e9
    print(f"{path} ({size:.1f} GB): building the index of its rows, once, in {folder} ...", file=sys.stderr, flush=True)
    found, told = Found(), time.monotonic()
    for name in (PLACES, ROWS):  # another run may still use the files of an index that is now damaged
        (folder / name).unlink(missing_ok=True)
    with open(folder / PLACES, "wb") as places, open(folder / ROWS, "wb") as rows:
        for chunk in chunks(found):
            for raw, line, _ in chunk:
                places.write(_PLACE.pack(rows.tell() if raw.offset is None else raw.offset, raw.number))
                if raw.offset is None:
                    rows.write(line + b"\n")
            if chunk and time.monotonic() > told + TELL_SECONDS:
                told = time.monotonic()
                print(f"{place(path, chunk[-1][0].number)} ...", file=sys.stderr, flush=True)
        found.num_bytes = rows.tell()
    return found


def _keep(folder: Path, found: Found) -> None:
    """Make the index valid, and remove those of earlier states of the file."""
    errors = [[e.what, e.where, e.remedy] for e in found.bad_rows.errors]
    text = json.dumps({**vars(found), "bad_rows": {"num": found.bad_rows.num, "errors": errors}})
    write_text(folder / INDEX, f"{xxhash.xxh3_64_hexdigest(text.encode())}\n{text}")
    path, content, *_ = folder.name.split("-")
    for old in folder.parent.glob(f"{path}-*"):
        if old.name.split("-")[1] != content:
            shutil.rmtree(old, ignore_errors=True)


def _found(folder: Path) -> Found | None:
    """Return the contents of an index in `folder`; None if it is missing, incomplete or damaged."""
    try:
        digest, _, text = (folder / INDEX).read_text(encoding="utf-8").partition("\n")
        sizes = [(folder / name).stat().st_size for name in (PLACES, ROWS)]
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if digest != xxhash.xxh3_64_hexdigest(text.encode()):
        return None
    record = json.loads(text)
    bad = record.pop("bad_rows")
    errors = [DataError(what, where=where, remedy=remedy) for what, where, remedy in bad["errors"]]
    found = Found(**record, bad_rows=BadRows(bad["num"], errors))
    return found if sizes == [found.num_rows * _PLACE.size, found.num_bytes] else None


def cache_folder(cache_path: str | None) -> Path:
    if cache_path is not None:
        return Path(cache_path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instep" / "data"


def _name(path_spec: str, checked: Any, kept: Any = None) -> str:
    """Return the folder name of an index, from path and user, content of the file, the rows read, and `kept`."""
    path, part = parse_path(path_spec)
    rows = [FORMAT, part.start, part.stop, checked]
    parts = [[os.path.realpath(path), os.getuid()], _identity(path.stat()), rows, kept]
    names = [xxhash.xxh3_64_hexdigest(json.dumps(one, sort_keys=True, default=str).encode()) for one in parts]
    return "-".join(names[: 3 if kept is None else 4])


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _changed(path: Path) -> DataError:
    return DataError("the data file was changed while the run read it", where=str(path), remedy="start the run again")


def _wait_for(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + BUILD_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            what = f"another process has built this index for {BUILD_SECONDS / 3600:.0f} hours"
            raise DataError(what, where=str(folder), remedy="end that process, or remove the folder")
        time.sleep(0.2)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process builds this index. The lock ends with its process."""
    folder.mkdir(0o700, parents=True, exist_ok=True)  # for rows of a file that others may not read
    with open(folder / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process builds this index; waiting for it ...", file=sys.stderr, flush=True)
            _wait_for(lock.fileno(), folder)
        yield

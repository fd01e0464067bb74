"""The list of a folder's files with their sizes and digests, written as its last file: it shows that the folder is
complete, that instep has written it, and whether a byte has changed since.

    {"written_by": "instep", "kind": "checkpoint", "digest": "xxh3-128", "files": {NAME: [BYTES, DIGEST], ...}}
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import xxhash

from instep.atomic import free_name, replace_folder, sync_folder, write_text
from instep.errors import CheckpointError

MANIFEST = "files.json"
DIGEST = "xxh3-128"
Kind = Literal["checkpoint", "export"]  # of a run; of weights in Hugging Face's format
logger = logging.getLogger(__name__)


def write_manifest(folder: Path, kind: Kind = "checkpoint") -> None:
    """List the files in `folder`, to which nothing may be added afterwards.

    A checkpoint is on the disk when this returns; an export, whose files a user may edit, gets no digests.
    """
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p != folder / MANIFEST]
    durable = kind == "checkpoint"
    with ThreadPoolExecutor(_threads()) as pool:
        digests = pool.map(lambda path: _digest(path, sync=True) if durable else None, paths)
        found = zip(paths, digests, strict=True)
        files = {str(path.relative_to(folder)): [path.stat().st_size, digest] for path, digest in found}
    content = {"written_by": "instep", "kind": kind, "digest": DIGEST, "files": files}
    write_text(folder / MANIFEST, json.dumps(content), flush=durable)
    for inner in (p for p in folder.rglob("*") if durable and p.is_dir()):
        sync_folder(inner)


def is_ours(folder: Path, kind: Kind) -> bool:
    """Whether instep has written this folder, as one of this kind, and nobody has put anything into it since."""
    try:
        found, files = _read_manifest(folder)
    except (OSError, ValueError):
        return False
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    return found == kind and there <= {*files, MANIFEST}


def put_in_place(new: Path, place: Path, old: Path, kind: Kind) -> None:
    """Rename `new` to `place`, whose former content is removed if instep has written it, else kept beside it.

    `old` is the name of that content while both names exist, see `replace_folder`.
    """
    if os.path.lexists(place) and not is_ours(place, kind) and not (place.is_dir() and not any(place.iterdir())):
        aside = free_name(place.parent, f"{place.name}.old")
        os.rename(place, aside)
        logger.warning("%s held something that instep has not written; it is %s now", place, aside)
    replace_folder(new, place, old)


def check_whole(folder: Path, *, digests: bool = True) -> None:
    """Compare `folder` with its list of files; one of another framework, without a list, needs its `.metadata`.

    Args:
        digests: read all files and compare their content: xxh3 takes what disk or page cache gives.

    Raises:
        CheckpointError: a file is missing or another one; the remedy names the complete checkpoints beside it.
    """
    problem = _problem(folder, digests)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint {folder.name} is damaged: {problem[1]}",
            where=str(problem[0]),
            remedy="restore the file, or " + others(folder),
        )


def has_digests(folder: Path) -> bool:
    """False for a checkpoint of an earlier instep, which lists sizes alone. For one that passed `check_whole`."""
    return not (folder / MANIFEST).exists() or None not in (d for _, d in _read_manifest(folder)[1].values())


def complete(root: Path) -> list[int]:
    """The iterations of the checkpoints in `root` that instep has written completely, by their files' sizes."""
    folders = [p for p in sorted(root.glob("iter_*")) if p.is_dir() and (p / MANIFEST).exists()]
    return [int(number) for p in folders if (number := p.name[5:]).isdigit() and not _problem(p, digests=False)]


def others(folder: Path) -> str:
    """The remedy that names the complete checkpoints beside `folder`."""
    numbers = [n for n in complete(folder.parent) if f"iter_{n:07d}" != folder.name]
    if not numbers:
        return "begin anew without --load: there is no other"
    return f"take another with --ckpt-step: {', '.join(map(str, numbers[-5:]))}"


def contents(folder: Path) -> str:
    """What is in a folder, for errors."""
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def _problem(folder: Path, digests: bool) -> tuple[Path, str] | None:
    manifest = folder / MANIFEST
    if not manifest.exists():
        if any(folder.glob("rng_*")) or (folder / "run_state.json").exists():
            return manifest, f"it is one of instep's, and its list of files is missing; there is {contents(folder)}"
        if not (folder / ".metadata").exists():
            return folder, f"it is not complete, .metadata is missing; there is {contents(folder)}"
        return None
    try:
        files = _read_manifest(folder)[1]
    except (OSError, ValueError) as error:
        return manifest, f"its list of files cannot be read: {error}"
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return path, f"{name} is missing"
        if path.stat().st_size != size:
            return path, f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    if digests:
        with ThreadPoolExecutor(_threads()) as pool:
            found = pool.map(lambda name: _digest(folder / name), files)
            for (name, (_, digest)), now in zip(files.items(), found, strict=True):
                if digest not in (None, now):
                    return folder / name, f"{name} has another content than was written"
    return None


def _read_manifest(folder: Path) -> tuple[str, dict[str, tuple[int, str | None]]]:
    """The kind, and size and digest by name; an earlier instep listed sizes alone. Raises: OSError, ValueError."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if content.get("written_by") != "instep":
        sizes = {name: [size, None] for name, size in content.items()}
        content = {"kind": "checkpoint", "digest": DIGEST, "files": sizes}
    files = content.get("files")
    if content.get("digest") != DIGEST or not isinstance(files, dict):
        raise ValueError(f"it has no files with digests of the kind {DIGEST}")
    for name, entry in files.items():
        if not (isinstance(entry, list) and [type(x) for x in entry] in ([int, str], [int, type(None)])):
            raise ValueError(f"the entry of {name} is no size and digest")
    return str(content.get("kind")), {name: (entry[0], entry[1]) for name, entry in files.items()}


def _digest(path: Path, *, sync: bool = False) -> str:
    """The digest of a file's content; with `sync` that content is on the disk afterwards."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
        if sync:
            os.fsync(file.fileno())
    return state.hexdigest()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)

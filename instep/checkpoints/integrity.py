"""The list of a folder's files with their sizes and digests, which is written last.

It shows that the folder is complete, that instep has written it, and whether a byte has changed since.

{"written_by": "instep", "kind": "checkpoint", "digest": "xxh3-128", "files": {NAME: [BYTES, DIGEST], ...}}
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

import xxhash

from instep.errors import CheckpointError
from instep.system.atomic import free_name, replace_folder, sync_folder, write_text
from instep.system.documents import read_json

MANIFEST = "files.json"
TRACKER = "latest_checkpointed_iteration.txt"
DIGEST = "xxh3-128"
TELL_SECONDS = 1.0  # until a line says that files are read
SEEN_SECONDS = 60.0  # until a host sees names that others have written: NFS may cache a listing so long (acdirmax)
LOOK_SECONDS = 0.2
# A run's checkpoint; its weights in Hugging Face's format; the result of `instep convert`.
Kind = Literal["checkpoint", "export", "conversion"]
logger = logging.getLogger(__name__)


def write_manifest(folder: Path, kind: Kind = "checkpoint", known: Mapping[str, str] | None = None) -> None:
    """List the files in `folder`. Nothing may be added to it afterwards.

    A checkpoint is on the disk when this returns. The other kinds get no digests: users may edit their files.

    Args:
        known: digests by name of files that are on the disk, also of files written by other hosts. All other files are
            read here.

    Raises:
        CheckpointError: a file of `known` is not here.
        OSError: a file cannot be read or written.
    """
    paths = _listed(folder, known or {})
    durable = kind == "checkpoint"
    digests: dict[str, str | None] = dict.fromkeys(paths) | dict(known or {})
    if durable:
        new = {name: path for name, path in paths.items() if digests[name] is None}
        digests |= dict(zip(new, _read_digests(list(new.values()), sync=True), strict=True))
    files = {name: [path.stat().st_size, digests[name]] for name, path in paths.items()}
    content = {"written_by": "instep", "kind": kind, "digest": DIGEST, "files": files}
    write_text(folder / MANIFEST, json.dumps(content), flush=durable)
    for inner in (p for p in folder.rglob("*") if durable and p.is_dir()):
        sync_folder(inner)


def _listed(folder: Path, known: Mapping[str, str]) -> dict[str, Path]:
    """Return the files in `folder` by name, once those of `known` are among them."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        paths.pop(MANIFEST, None)
        if not (missing := sorted(known.keys() - paths.keys())):
            return paths
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{', '.join(missing[:3])} (of {len(missing)} such files) are written, and not in the folder that the "
                "controller sees: all hosts must share it",
                where=str(folder),
                remedy="put checkpoints on a file system that all hosts share",
            )
        time.sleep(LOOK_SECONDS)


def digests_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """Return the digests by name of the files of `rank` in `folder`, and flush these files to the disk."""
    paths = [p for pattern in (f"__{rank}_*.distcp", f"rng_{rank}.pt") for p in sorted(folder.glob(pattern))]
    return {p.name: digest for p, digest in zip(paths, _read_digests(paths, sync=True), strict=True)}


def linked_digests(folder: Path, whole: Path) -> dict[str, str]:
    """Return the digests by name of the files of `folder` that are links into the complete checkpoint `whole`."""
    there = {name: digest for name, (_, digest) in _read_manifest(whole)[1].items() if (folder / name).exists()}
    return {name: d for name, d in there.items() if d is not None and os.path.samefile(folder / name, whole / name)}


def is_ours(folder: Path, kind: Kind) -> bool:
    """Return whether instep has written this folder, as this kind, and no one has added anything to it since."""
    try:
        found, files = _read_manifest(folder)
    except (OSError, ValueError):
        return False
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    return found == kind and there <= {*files, MANIFEST}


def put_in_place(new: Path, place: Path, old: Path, kind: Kind, keep: Path | None = None) -> None:
    """Rename `new` to `place`. Former content of `place` is removed if instep has written it; otherwise it is kept
    beside it.

    `old` is the name of that content while both names exist (see `replace_folder`). `keep` is its final name.
    """
    harmless = not os.path.lexists(place) or is_ours(place, kind) or (place.is_dir() and not any(place.iterdir()))
    if keep is None and not harmless:
        aside = free_name(place.parent, f"{place.name}.old")
        os.rename(place, aside)
        logger.warning("%s held files that instep has not written; they are in %s now", place, aside)
    replace_folder(new, place, old, keep)


def check_whole(*folders: Path, digests: bool = True, tell: Callable[[str], None] = lambda line: None) -> None:
    """Compare checkpoints with their lists of files; checkpoints of other frameworks do not have one.

    Args:
        digests: read all files and compare their content: xxh3 runs at the speed of the disk or the page cache.
        tell: shows a line to the user, if this takes seconds.

    Raises:
        CheckpointError: a file is missing or differs; the remedy names the complete checkpoints beside it.
    """
    written: dict[Path, tuple[Path, str]] = {}  # file -> its folder and its digest
    for folder in folders:
        if (problem := _problem(folder)) is not None:
            raise _damaged(folder, *problem)
        if digests and (folder / MANIFEST).exists():
            files = _read_manifest(folder)[1].items()
            written |= {folder / name: (folder, digest) for name, (_, digest) in files if digest is not None}
    try:
        found = _read_digests(list(written), tell=tell)
    except OSError as error:
        path = Path(error.filename or folders[0])
        raise _damaged(path.parent, path, f"{path.name} cannot be read: {error.strerror or error}") from error
    for (path, (folder, digest)), now in zip(written.items(), found, strict=True):
        if digest != now:
            raise _damaged(folder, path, f"{path.relative_to(folder)} has different content than was written")


def _damaged(folder: Path, where: Path, how: str) -> CheckpointError:
    what = f"the checkpoint {folder.name} is damaged: {how}"
    return CheckpointError(what, where=str(where), remedy="restore the file, or " + others(folder))


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder is one checkpoint, in Megatron's format `torch_dist` or `torch`."""
    return (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*/model_optim_rng.pt"))


def has_digests(folder: Path) -> bool:
    """Return False for a checkpoint of an earlier instep, which lists only sizes. It must have passed `check_whole`."""
    return not (folder / MANIFEST).exists() or None not in (d for _, d in _read_manifest(folder)[1].values())


def complete(root: Path) -> list[int]:
    """Return the iterations of the checkpoints in `root` that instep has written completely, by their files' sizes."""
    folders = [p for p in sorted(root.glob("iter_*")) if p.is_dir() and (p / MANIFEST).exists()]
    return [int(number) for p in folders if (number := p.name[5:]).isdigit() and not _problem(p)]


def others(folder: Path) -> str:
    """Return the remedy that names the complete checkpoints beside `folder`."""
    numbers = [n for n in complete(folder.parent) if f"iter_{n:07d}" != folder.name]
    foreign = [
        p.name for p in sorted(folder.parent.glob("[!.]*")) if p != folder and is_checkpoint(p) and not _problem(p)
    ]
    if not numbers and foreign:  # of another framework, or `release`
        return f"write another into {folder.parent / TRACKER}: {', '.join(foreign[-5:])} (its number, or `release`)"
    if not numbers:
        return "start again without --load: there is no other checkpoint"
    return f"take another with --ckpt-step: {', '.join(map(str, numbers[-5:]))}"


def contents(folder: Path) -> str:
    """Return what is in a folder, for errors."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return "nothing"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def _problem(folder: Path) -> tuple[Path, str] | None:
    """Return the wrong file of a checkpoint, and what is wrong, by its list of files and their sizes."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        if any(folder.glob("rng_*")) or (folder / "run_state.json").exists():
            return manifest, f"instep has written it, and its list of files is missing; there is {contents(folder)}"
        if not is_checkpoint(folder):
            return folder, f"it is not complete, .metadata is missing; there is {contents(folder)}"
        return None
    try:
        files = _read_manifest(folder)[1]
    except (OSError, ValueError) as error:
        return manifest, f"its list of files cannot be read: {error}"
    for name, (size, _) in files.items():
        path = folder / name
        try:
            now = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            now = None
        if now is None or not stat.S_ISREG(now.st_mode):
            return path, f"{name} is missing"
        if now.st_size != size:
            return path, f"{name} has {now.st_size:,} bytes instead of {size:,}"
    return None


def _read_manifest(folder: Path) -> tuple[str, dict[str, tuple[int, str | None]]]:
    """Return the kind, and size and digest by name (of an earlier instep only sizes). Raises: OSError, ValueError."""
    content = read_json(folder / MANIFEST)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if content.get("written_by") != "instep":
        sizes = {name: [size, None] for name, size in content.items()}
        content = {"kind": "checkpoint", "digest": DIGEST, "files": sizes}
    files = content.get("files")
    if content.get("digest") != DIGEST or not isinstance(files, dict):
        raise ValueError(f"it has no files with digests of the kind {DIGEST}")
    for name, entry in files.items():
        if not (isinstance(entry, list) and [type(x) for x in entry] in ([int, str], [int, type(None)])):
            raise ValueError(f"the entry of {name} is not a size and a digest")
        if (path := Path(name)).is_absolute() or ".." in path.parts:
            raise ValueError(f"it lists {name!r:.80}, which is not in its folder")
    return str(content.get("kind")), {name: (entry[0], entry[1]) for name, entry in files.items()}


def _read_digests(
    paths: Sequence[Path], *, sync: bool = False, tell: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Return the digests of files, which threads read in parallel; a file with several names is read once.

    With `sync` their content is on the disk afterwards. `tell` gets a line after 1, 3, 7, ... seconds.
    """
    stats = [path.stat() for path in paths]
    names = {(stat.st_dev, stat.st_ino): path for stat, path in zip(stats, paths, strict=True)}
    total = sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())
    read, pause = [0], TELL_SECONDS
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = {file: pool.submit(_digest, path, sync, read) for file, path in names.items()}
        while wait(digests.values(), pause).not_done:
            tell(f"comparing {total / 1e9:.2f} GB of checkpoints with their digests: {read[0] / 1e9:.2f} GB are done")
            pause *= 2
    return [digests[stat.st_dev, stat.st_ino].result() for stat in stats]


def _digest(path: Path, sync: bool, read: list[int]) -> str:
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
            read[0] += size
        if sync:
            os.fsync(file.fileno())
    return state.hexdigest()


def folder_digest(files: Sequence[Path]) -> str:
    """Return one digest of several files: of their names and contents."""
    lines = [f"{path.name} {digest}" for path, digest in zip(files, _read_digests(files), strict=True)]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

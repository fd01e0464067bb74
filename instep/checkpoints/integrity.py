"""The list of a checkpoint's files and their sizes, written as its last file, which shows whether it is complete."""

from __future__ import annotations

import json
from pathlib import Path

from instep.errors import CheckpointError

MANIFEST = "files.json"


def write_manifest(folder: Path) -> None:
    """List the files in `folder`, to which nothing may be added afterwards."""
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps(sizes))


def check_whole(folder: Path) -> None:
    """Compare `folder` with its manifest; a folder without a manifest (another framework's) passes.

    Raises:
        CheckpointError: a file is missing or has another size; the remedy names the complete checkpoints beside it.
    """
    problem = _problem(folder)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint {folder.name} is damaged: {problem[1]}",
            where=str(problem[0]),
            remedy="restore the file, or " + others(folder),
        )


def others(folder: Path) -> str:
    """The remedy that names the complete checkpoints beside `folder`."""
    names = [p.name for p in sorted(folder.parent.glob("iter_*")) if p != folder and p.is_dir() and not _problem(p)]
    numbers = ", ".join(str(int(n.removeprefix("iter_"))) for n in names[-5:])
    return f"take another with --ckpt-step: {numbers}" if names else "begin anew without --load: there is no other"


def _problem(folder: Path) -> tuple[Path, str] | None:
    manifest = folder / MANIFEST
    if not manifest.exists():
        return None
    try:
        sizes = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        return manifest, f"its list of files cannot be read: {error}"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return path, f"{name} is missing"
        if path.stat().st_size != size:
            return path, f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    return None

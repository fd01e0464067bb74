"""Check that the disks have room for the saves of a run, from the number of the model's weights."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from instep.arguments.args import Args
from instep.cluster.placement import num_critic_gpus
from instep.errors import CheckpointError
from instep.models.sizes import shape_of
from instep.system.scratch import export_folder


class Saved(NamedTuple):
    """The output of one flag at a save: at least `num_bytes`. They stay if `kept`, else they replace the last."""

    flag: str
    folder: Path
    num_bytes: int
    kept: bool


def what_is_saved(args: Args) -> Iterator[Saved]:
    """Yield the least that each flag writes at a save, with `--precision` resolved.

    The `hf` backend saves float32 weights. Megatron saves its compute weights, and their float32 masters with the
    optimizer. Two moments per weight are float32. An adapter counts as zero.
    """
    shape = shape_of(os.path.abspath(args.hf_checkpoint))
    num = 0 if shape is None else shape.total
    narrow = args.precision == "bf16"
    weights = 2 if narrow and args.train_backend == "megatron" else 4
    role = num * (weights if args.no_save_optim else weights + 8 + (4 if weights == 2 else 0))
    if args.save:
        num_roles = (0 if args.lora_rank else 1) + (1 if num_critic_gpus(args) else 0)
        yield Saved("--save", Path(args.save), role * num_roles, True)
    elif args.critic_save:
        yield Saved("--critic-save", Path(args.critic_save), role, True)
    if args.save_hf:
        path, other = (export_folder(args.save_hf, i) for i in (0, 1))
        exported = 0 if args.save_hf_as == "adapter" else num * (2 if narrow else 4)
        yield Saved("--save-hf", path, exported, path != other)


def num_saves(args: Args, num_rounds: int) -> int:
    """Return how often a run saves within `num_rounds` rounds."""
    left, interval = max(0, num_rounds), args.save_interval
    return math.ceil(left / interval) if interval else min(1, left)


def check_space(args: Args, num_saves: int) -> list[str]:
    """Compare the free space with the needs of one save, and of all saves.

    Returns:
        A line for each disk that has room for one save but not for `num_saves`.

    Raises:
        CheckpointError: a disk does not have room for one save.
    """
    if not num_saves:
        return []
    lines = []
    disks: dict[int, list[tuple[Saved, Path]]] = {}
    for saved in what_is_saved(args):
        path = saved.folder.absolute()
        existing = next(p for p in (path, *path.parents) if p.exists())
        disks.setdefault(os.stat(existing).st_dev, []).append((saved, existing))
    for found in disks.values():
        parts, existing = [saved for saved, _ in found], found[0][1]
        size, _, free = shutil.disk_usage(existing)
        if size == 0:  # some network and FUSE file systems do not report it
            continue
        one = sum(part.num_bytes for part in parts)
        most = sum(part.num_bytes * (num_saves if part.kept else 1) for part in parts)
        flags = " and ".join(part.flag for part in parts)
        if one > free:
            raise CheckpointError(
                f"a save needs at least {_size(one)}, but only {_size(free)} are free",
                where=f"{flags}: the disk of {existing}",
                remedy="free space or save elsewhere; --no-save-optim saves only the weights",
            )
        if most > free:
            lines.append(
                f"{flags}: {num_saves} saves would need at least {_size(most)}, but {_size(free)} are free on the disk "
                f"of {existing}, enough for {int(free // one)}"
            )
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB ({num_bytes:,} bytes)"

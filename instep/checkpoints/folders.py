"""Checkpoints of a run: one folder per save, complete or not there at all.

    SAVE/latest_checkpointed_iteration.txt      the newest complete one, as Megatron writes it
    SAVE/iter_0000010/                          the trainer's files (`.distcp` and others), `rng_<rank>.pt`
    SAVE/iter_0000010/critic/                   the same of PPO's critic
    SAVE/iter_0000010/run_state.json            ledger, data cursor, buffered samples, counters, configuration

A save goes to a hidden folder first and is renamed when it is whole, so that a crash or a full disk never harms the
last good one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.atomic import replace_folder, write_text
from instep.checkpoints.integrity import others, write_manifest
from instep.errors import CheckpointError, ConfigError

CRITIC = "critic"  # the critic's folder within a checkpoint
TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def latest_iteration(root: Path | None) -> int | None:
    """The number in `latest_checkpointed_iteration.txt`, or None where there is no such file."""
    if root is None or not (root / TRACKER).exists():
        return None
    text = (root / TRACKER).read_text(errors="backslashreplace").strip()
    try:
        return int(text)
    except ValueError:
        raise CheckpointError(
            f"{text!r:.60} is no iteration",
            where=str(root / TRACKER),
            remedy=f"write the number of a complete folder into it, or {others(root / TRACKER)}",
        ) from None


def find_checkpoint(root: Path | None, step: int | None) -> tuple[Path, int] | None:
    """The checkpoint to continue from: `step` if given, else the latest; None if there is none.

    Raises:
        CheckpointError: the tracker or `--ckpt-step` names one that is not there.
    """
    iteration = step if step is not None else latest_iteration(root)
    if root is None or iteration is None:
        return None
    folder = iteration_folder(root, iteration)
    replaced = root / f".{folder.name}.old"
    if not folder.is_dir() and replaced.is_dir():  # killed between the two renames of `replace_folder`
        os.rename(replaced, folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint of iteration {iteration}",
            where=str(folder),
            remedy=f"correct {root / TRACKER} or --ckpt-step; {others(folder)}",
        )
    return folder, iteration


def save_checkpoint(root: Path, iteration: int, write: Callable[[Path], None], state: dict[str, Any] | None) -> Path:
    """Write one checkpoint atomically.

    Args:
        write: puts the trainer's files into the folder it is given.
        state: the controller's part, as JSON; None in a folder that no run goes on from (--critic-save).

    Raises:
        CheckpointError: it could not be written; nothing of it is left, the last good one is untouched.
    """
    final = iteration_folder(root, iteration)
    partial = root / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        if state is not None:
            write_json(partial / "run_state.json", state)
        write_manifest(partial)
        replace_folder(partial, final, root / f".{final.name}.old")
        write_text(root / TRACKER, str(iteration), flush=True)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration} could not be written{_free_space(root)}: "
            f"{getattr(error, 'what', error)}",
            where=str(root),
            remedy="free space or fix permissions; the last complete checkpoint is untouched",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _free_space(root: Path) -> str:
    try:
        return f" ({shutil.disk_usage(root).free / 1e6:,.1f} MB are free)"
    except OSError:  # the folder is not there, or may not be looked at: the error itself says so
        return ""


def read_state(folder: Path) -> dict[str, Any] | None:
    """The controller's part of a checkpoint; None if it was not written by instep."""
    path = folder / "run_state.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"run_state.json cannot be read: {error}", where=str(path), remedy=others(folder)
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Atomically, flushed to the disk."""
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise CheckpointError(
            f"something in the run's state is no plain value: {error}",
            where=str(path),
            remedy="keep numbers, strings, lists and dicts in samples' rewards, labels and metadata",
        ) from error
    write_text(path, text, flush=True)


def weights_folder(path: Path, step: int | None, flag: str) -> Path:
    """The folder that holds the weights `flag` names: a Hugging Face checkpoint itself, or one of ours within `path`.

    Raises:
        ConfigError: `path` holds neither. CheckpointError: the tracker names a checkpoint that is not there.
    """
    if (path / "config.json").exists():
        return path
    found = find_checkpoint(path, step)
    if found is None:
        raise ConfigError(
            f"{path} is neither a Hugging Face checkpoint nor holds one of instep's",
            where=flag,
            remedy="name a folder with config.json, or one with latest_checkpointed_iteration.txt",
        )
    return found[0]


def critic_folder(args: Any) -> Path:
    """The checkpoint that `--critic-load` means."""
    return weights_folder(Path(args.critic_load), None, "--critic-load")


def reference_folder(args: Any) -> Path:
    """The checkpoint that the reference starts from: `--ref-load`, else `--hf-checkpoint`."""
    step = args.ref_ckpt_step if args.ref_load else None
    return weights_folder(Path(args.ref_load or args.hf_checkpoint), step, "--ref-load")


def teacher_folder(args: Any) -> Path:
    """The checkpoint that `--opd-teacher-load` means."""
    return weights_folder(Path(args.opd_teacher_load), args.opd_teacher_ckpt_step, "--opd-teacher-load")

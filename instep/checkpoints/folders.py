"""The checkpoints of a run: one folder per save, either complete or absent.

    SAVE/latest_checkpointed_iteration.txt      the number of the newest checkpoint (Megatron's file), or `release`
    SAVE/iter_0000010/                          the trainer's files (`.distcp` and others), `rng_<rank>.pt`
    SAVE/iter_0000010/critic/                   the files of PPO's critic
    SAVE/iter_0000010/run_state.json            ledger, data cursor, buffered samples, counters, configuration
    SAVE/iter_0000010/files.json                sizes and digests of the other files; see `integrity.py`
    SAVE/release/                               converted weights; not a step of a run
    SAVE/old-1/                                 checkpoints of an earlier run, moved at a new run's first save

A save writes a hidden folder and renames it when it is complete. So a crash or a full disk never damages the last good
checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from instep.arguments.settings import AlgorithmSettings, ModelSettings, Settings
from instep.checkpoints.integrity import (
    TRACKER,
    complete,
    contents,
    is_checkpoint,
    others,
    put_in_place,
    write_manifest,
)
from instep.checkpoints.state_json import SAVABLE, from_text, to_text
from instep.errors import CheckpointError, ConfigError
from instep.system.atomic import free_name, write_text
from instep.system.documents import read_text

CRITIC = "critic"  # the critic's folder within a checkpoint
# What a resume needs in run_state.json. The owners of `ledger` and `data_source` check these two entries.
_STATE = {"rollout_id": int, "num_steps": int, "version": int, "ledger": dict, "evaluations": list, "args": dict}
RELEASE = -1  # the iteration of the folder `release`: numbers of rollouts start at 0


def iteration_folder(root: Path, iteration: int) -> Path:
    return root / ("release" if iteration == RELEASE else f"iter_{iteration:07d}")


def latest_iteration(root: Path | None) -> int | None:
    """Return the number in `latest_checkpointed_iteration.txt`; `RELEASE`; or None if there is neither file nor
    checkpoint.

    Without the file (a kill during the first save), return the newest complete checkpoint.

    Raises:
        CheckpointError: the file holds no number; or it is missing, and no folder is complete.
    """
    if root is None or not root.is_dir():
        return None
    if not (root / TRACKER).exists():
        if any(p.is_dir() for p in root.glob("iter_*")) and not complete(root):
            raise CheckpointError(
                f"{TRACKER} is missing, and no complete checkpoint of instep is there, but {contents(root)}",
                where=str(root),
                remedy="write the number of a checkpoint into that file, or set --ckpt-step; or name another folder",
            )
        return max(complete(root), default=None)
    try:
        text = read_text(root / TRACKER).strip()
    except (OSError, ValueError) as error:
        text = str(getattr(error, "strerror", None) or error)
    if text == "release" or (text.isdecimal() and len(text) < 19):
        return RELEASE if text == "release" else int(text)
    raise CheckpointError(
        f"{text!r:.60} is neither an iteration nor 'release'",
        where=str(root / TRACKER),
        remedy=f"write the number of a complete folder into it, or {others(root / TRACKER)}",
    )


def find_checkpoint(root: Path | None, step: int | None) -> tuple[Path, int] | None:
    """Return the folder and the iteration of checkpoint `step`, by default the latest; None if there is none.

    Raises:
        CheckpointError: the checkpoint in the tracker or `--ckpt-step` does not exist, or `root` is itself a
            checkpoint.
    """
    if root is not None and is_checkpoint(root):
        number = "" if root.name == "release" else ", and its number by --ckpt-step (--ref-ckpt-step for --ref-load)"
        what = f"{root.name} is a checkpoint itself, not a folder of checkpoints"
        raise CheckpointError(what, where=str(root), remedy=f"name {root.parent}{number}")
    iteration = step if step is not None else latest_iteration(root)
    if root is None or iteration is None:
        return None
    folder = iteration_folder(root, iteration)
    if not folder.is_dir() and _replaced(folder).is_dir():  # see `finish_renames`; another run may be about to do it
        return _replaced(folder), iteration
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {'`release`' if iteration == RELEASE else f'of iteration {iteration}'}",
            where=str(folder),
            remedy=f"correct {root / TRACKER} or --ckpt-step; {others(folder)}",
        )
    return folder, iteration


def _replaced(folder: Path) -> Path:
    """Return the name of a checkpoint while another one takes its place."""
    return folder.with_name(f".{folder.name}.old")


def finish_renames(root: Path) -> None:
    """Restore what a killed save left renamed, and remove what it did not complete; `root` is locked."""
    for partial in root.glob(".iter_*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for replaced in root.glob(".iter_*.old"):
        if not (place := root / replaced.name[1:-4]).exists():
            os.rename(replaced, place)


def begin_checkpoint(
    root: Path,
    iteration: int,
    begin: Callable[[Path], Callable[[], Mapping[str, str]]],
    state: dict[str, Any] | None,
    earlier: Callable[[Path], None] | None = None,
) -> Callable[[], Path]:
    """Start to write a checkpoint. Return a function that finishes it, in any thread, and returns its folder.

    Until then the folder is hidden. `state` may change after this function has returned.

    Args:
        begin: starts to write the trainer's files into the folder that it gets. It returns a function that waits for
            them, and returns the known digests of files on the disk, by name.
        state: the controller's part, as JSON; None for a folder that no run resumes from (--critic-save).
        earlier: set if the checkpoints in `root` belong to an earlier run. They are moved to `root/old-<n>` when this
            one is in place; then this function is called with that folder.

    Raises:
        CheckpointError: it could not be written. Its files are removed, and the last good checkpoint is untouched.
    """
    final = iteration_folder(root, iteration)
    partial = root / f".{final.name}.partial"
    place = partial / "run_state.json"
    try:
        text = None if state is None else to_text(state)
    except (TypeError, ValueError) as error:
        what = f"the run's state cannot be saved: {error}"
        raise CheckpointError(what, where=str(place), remedy=SAVABLE) from error
    with _whole_or_nothing(root, iteration, partial):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        wait = begin(partial)

    def end() -> Path:
        with _whole_or_nothing(root, iteration, partial):
            known = wait()
            if text is not None:
                write_text(place, text, flush=True)
            write_manifest(partial, "checkpoint", known)
            before = [p for p in root.glob("iter_*") if p != final] if earlier else []
            aside = _aside(root) if before or (earlier and final.exists()) else None
            put_in_place(partial, final, _replaced(final), "checkpoint", aside and aside / final.name)
            write_text(root / TRACKER, str(iteration), flush=True)
            if aside is not None:
                for path in before:
                    os.rename(path, aside / path.name)
        if earlier and aside is not None:
            earlier(aside)
        return final

    return end


@contextmanager
def _whole_or_nothing(root: Path, iteration: int, partial: Path) -> Iterator[None]:
    """Remove the hidden folder of a checkpoint if the block fails, and name the remaining checkpoints in the error."""
    with ExitStack() as unless_whole:  # also after Ctrl-C
        unless_whole.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            yield
        except (OSError, CheckpointError) as error:
            free, done = "", complete(root)
            with suppress(OSError):  # the folder is missing or not accessible: the error itself says so
                free = f" ({shutil.disk_usage(root).free / 1e6:,.1f} MB are free)"
            left = f"iteration {done[-1]} is complete in {root}, and a resume starts from it" if done else ""
            raise CheckpointError(
                f"the checkpoint of iteration {iteration} could not be written{free}: {getattr(error, 'what', error)}",
                where=str(root),
                remedy=f"free space or fix permissions; {left or f'there is no complete checkpoint in {root}'}",
            ) from error
        unless_whole.pop_all()


def _aside(root: Path) -> Path:
    """Return a new folder for the checkpoints of an earlier run, with the number of its newest checkpoint."""
    place = free_name(root, "old")
    place.mkdir()
    if (root / TRACKER).exists():
        shutil.copyfile(root / TRACKER, place / TRACKER)
    return place


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the controller's part of a checkpoint; None if another framework wrote it.

    Raises:
        CheckpointError: it cannot be read, or an entry is missing or has another type.
    """
    path = folder / "run_state.json"
    if not path.exists():
        return None
    try:
        state = from_text(read_text(path))
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
        for name, kind in _STATE.items():
            if type(state.get(name)) is not kind:
                raise ValueError(f"{name} is {'missing' if name not in state else 'no ' + kind.__name__}")
        if not all(isinstance(row, dict) and "rollout_id" in row for row in state["evaluations"]):
            raise ValueError("an entry of evaluations has no rollout_id")
    except (OSError, ValueError, RecursionError) as error:
        what = f"run_state.json cannot be read: {error}"
        raise CheckpointError(what, where=str(path), remedy=others(folder)) from error
    return state


def has_optimizer(folder: Path) -> bool:
    """Return whether a Megatron checkpoint holds an optimizer state.

    Raises:
        CheckpointError: it cannot be read.
    """
    from instep.checkpoints.dist_checkpoint import METADATA, read_index  # torch is imported only here
    from instep.checkpoints.torch_files import load_data

    if (folder / METADATA).is_file():
        return any("optimizer." in key for key in read_index(folder).state_dict_metadata)
    files = sorted(folder.glob("mp_rank_*/*.pt"))
    return any(path.name != "model_optim_rng.pt" for path in files) or "optimizer" in load_data(files[0])


def weights_folder(path: Path, step: int | None, flag: str) -> Path:
    """Return the folder of the weights that `flag` names: the Hugging Face checkpoint `path`, or instep's checkpoint in
    it.

    Raises:
        ConfigError: `path` holds neither.
        CheckpointError: the checkpoint in the tracker does not exist.
    """
    if (path / "config.json").exists():
        return path
    found = find_checkpoint(path, step)
    if found is None:
        raise ConfigError(
            f"{path} is not a Hugging Face checkpoint and holds no instep checkpoint",
            where=flag,
            remedy="name a folder with config.json or with latest_checkpointed_iteration.txt",
        )
    return found[0]


def critic_folder(args: AlgorithmSettings) -> Path:
    """Return the checkpoint that `--critic-load` names."""
    return weights_folder(Path(args.critic_load or ""), None, "--critic-load")


def reference_folder(args: ModelSettings) -> Path:
    """Return the checkpoint of the reference policy: `--ref-load`, by default `--hf-checkpoint`."""
    step = args.ref_ckpt_step if args.ref_load else None
    return weights_folder(Path(args.ref_load or args.hf_checkpoint), step, "--ref-load")


def teacher_folder(args: AlgorithmSettings) -> Path:
    """Return the checkpoint that `--opd-teacher-load` names."""
    return weights_folder(Path(args.opd_teacher_load or ""), args.opd_teacher_ckpt_step, "--opd-teacher-load")


def checkpoints_read(args: Settings) -> list[Path]:
    """Return the checkpoints that a run starts from, each once; not Hugging Face folders, which users may edit.

    Raises:
        ConfigError, CheckpointError: one of them does not exist.
    """
    loaded = find_checkpoint(Path(args.load), args.ckpt_step) if args.load else None
    folders = [loaded[0]] if loaded is not None else []
    if args.ref_load:
        folders.append(reference_folder(args))
    if args.use_opd and args.opd_type == "model":
        folders.append(teacher_folder(args))
    if args.critic_load is not None:
        folders.append(critic_folder(args))
    return [folder for folder in dict.fromkeys(folders) if not (folder / "config.json").exists()]

"""Which weights a run begins with, and what it leaves behind: the files of actor, critic and reference."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from instep.cluster.local import WorkerGroup
from instep.controller.run_state import find_checkpoint, save_checkpoint
from instep.data.tokenizer import load_tokenizer
from instep.errors import ConfigError

CRITIC = "critic"  # the critic's folder within a checkpoint


def load_policy(args: Any, workers: WorkerGroup, checkpoint: Path | None) -> None:
    """`checkpoint`, which `--load` holds, else `--ref-load`, else `--hf-checkpoint` (the seeds' rule)."""
    timeout = args.worker_start_timeout
    if checkpoint is not None:
        workers.call("load", checkpoint, _with_optimizer(args), timeout=timeout)
    else:
        workers.call("load_weights", _first_weights(args), timeout=timeout)


def load_critic(args: Any, workers: WorkerGroup, checkpoint: Path | None) -> str:
    """The critic of `checkpoint`, which `--load` holds, else `--critic-load`, else the actor's weights with a new head.

    Returns:
        Where it begins, for the user.
    """
    timeout = args.worker_start_timeout
    if checkpoint is not None and (checkpoint / CRITIC).is_dir():
        workers.call("load", checkpoint / CRITIC, _with_optimizer(args), timeout=timeout)
        return f"the critic continues from {checkpoint / CRITIC}"
    if args.critic_load is not None:
        path = find_critic(Path(args.critic_load))
    else:
        path = checkpoint or _first_weights(args)
    has_head = (path / CRITIC).is_dir()
    path = path / CRITIC if has_head else path
    workers.call("load_weights", path, not has_head, timeout=timeout)
    return f"the critic begins with {path}{'' if has_head else ', and a value head of zeros'}"


def find_critic(folder: Path) -> Path:
    """The checkpoint that `--critic-load` means.

    Raises:
        ConfigError: there is none. CheckpointError: the tracker names one that is not there.
    """
    if (folder / "config.json").exists():
        return folder
    found = find_checkpoint(folder, None)
    if found is None:
        raise _no_checkpoint(folder, "--critic-load")
    return found[0]


def save_roles(groups: list[WorkerGroup], folder: Path, timeout: float) -> None:
    """The trainer's files of one checkpoint: the actor's in `folder`, the critic's in `folder/critic`."""
    saves = []
    for group in groups:
        if group.num_ranks:
            place = folder / CRITIC if group.role == CRITIC else folder
            place.mkdir(exist_ok=True)
            saves.append(group.start("save", place, timeout=timeout))
    for wait in saves:
        wait()


def save_critic(groups: list[WorkerGroup], root: Path, iteration: int, whole: Path | None, timeout: float) -> None:
    """The critic's part of a checkpoint in `root` (--critic-save): that of `whole`, if the run has just saved it."""

    def write(folder: Path) -> None:
        if whole is not None:
            shutil.copytree(whole / CRITIC, folder / CRITIC, copy_function=_link_or_copy)
        else:
            save_roles([group for group in groups if group.role == CRITIC], folder, timeout)

    save_checkpoint(root, iteration, write, None)


def _link_or_copy(source: str, target: str) -> None:
    """The same file under a second name, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _with_optimizer(args: Any) -> bool:
    return not (args.no_load_optim or args.finetune)


def _first_weights(args: Any) -> Path:
    """What an actor without a checkpoint begins with."""
    path = args.ref_load or args.hf_checkpoint
    if args.load and (Path(args.load) / "config.json").exists():
        path = args.load
    return _model_folder(args, Path(path))


def load_reference(args: Any, workers: WorkerGroup, resumed: Path | None, current: Path) -> None:
    """The reference model that `--ref-update-interval` has refreshed, else `--ref-load`, else `--hf-checkpoint`.

    Args:
        resumed: the checkpoint of the run that goes on.
        current: gets the refreshed one.
    """
    path = _model_folder(args, Path(args.ref_load or args.hf_checkpoint))
    if resumed is not None and (resumed / "reference").is_dir():
        path = Path(shutil.copytree(resumed / "reference", current))
    workers.call("load_reference", path, timeout=args.worker_start_timeout)


def load_teacher(args: Any, workers: WorkerGroup) -> None:
    """The model of `--opd-teacher-load`.

    Raises:
        ConfigError: there is none, or its tokenizer is not the student's.
    """
    path = teacher_folder(args)
    if (path / "config.json").exists():
        ours, theirs = (load_tokenizer(str(p)).get_vocab() for p in (args.hf_checkpoint, path))
        other = [token for token, i in sorted(ours.items(), key=lambda item: item[1]) if theirs.get(token) != i]
        if other:
            what = f"{ours[other[0]]} is {other[0]!r} to the student, {theirs.get(other[0])} to the teacher"
            raise ConfigError(
                f"the teacher has another vocabulary: {len(other)} of {len(ours)} tokens differ, token {what}",
                where=f"--opd-teacher-load {path}",
                remedy="distillation compares log-probs token by token: take a teacher with the student's tokenizer",
            )
    workers.call("load_teacher", path, timeout=args.worker_start_timeout)


def teacher_folder(args: Any) -> Path:
    """The checkpoint that `--opd-teacher-load` means."""
    return _checkpoint_in(Path(args.opd_teacher_load), args.opd_teacher_ckpt_step, "--opd-teacher-load")


def _model_folder(args: Any, path: Path) -> Path:
    """A Hugging Face checkpoint as it is; of a folder of ours, the checkpoint to use."""
    step = args.ref_ckpt_step if args.ref_load and path == Path(args.ref_load) else None
    return _checkpoint_in(path, step, "--ref-load")


def _checkpoint_in(path: Path, step: int | None, flag: str) -> Path:
    if (path / "config.json").exists():
        return path
    found = find_checkpoint(path, step)
    if found is None:
        raise _no_checkpoint(path, flag)
    return found[0]


def _no_checkpoint(path: Path, where: str) -> ConfigError:
    return ConfigError(
        f"{path} is neither a Hugging Face checkpoint nor holds one of instep's",
        where=where,
        remedy="name a folder with config.json, or one with latest_checkpointed_iteration.txt",
    )

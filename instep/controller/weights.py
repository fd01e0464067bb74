"""Which weights a run begins with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from instep.cluster.local import WorkerGroup
from instep.controller.run_state import find_checkpoint
from instep.errors import ConfigError


def load_policy(args: Any, workers: WorkerGroup, checkpoint: Path | None) -> None:
    """`checkpoint`, which `--load` holds, else `--ref-load`, else `--hf-checkpoint` (the seeds' rule)."""
    timeout = args.worker_start_timeout
    if checkpoint is not None:
        with_optimizer = not (args.no_load_optim or args.finetune)
        workers.call("load", checkpoint, with_optimizer, timeout=timeout)
        return
    path = args.ref_load or args.hf_checkpoint
    if args.load and (Path(args.load) / "config.json").exists():
        path = args.load
    workers.call("load_weights", _model_folder(args, Path(path)), timeout=timeout)


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


def _model_folder(args: Any, path: Path) -> Path:
    """A Hugging Face checkpoint as it is; of a folder of ours, the checkpoint to use."""
    if (path / "config.json").exists():
        return path
    step = args.ref_ckpt_step if args.ref_load and path == Path(args.ref_load) else None
    found = find_checkpoint(path, step)
    if found is None:
        raise ConfigError(
            f"{path} is neither a Hugging Face checkpoint nor holds one of instep's",
            where="--ref-load",
            remedy="name a folder with config.json, or one with latest_checkpointed_iteration.txt",
        )
    return found[0]

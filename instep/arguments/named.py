"""Names of the Hugging Face hub in a command line: models become folders, data sets become files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from instep.arguments.concern import Problem, Settings, flag_name
from instep.arguments.parser import Scan
from instep.checkpoints.folders import find_checkpoint, read_state
from instep.data.named import file_of, is_named
from instep.data.rows import split_files
from instep.engines.topology import entries
from instep.errors import ConfigError
from instep.models import hub

# Without `--load`: its folder may not exist yet.
MODELS = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")


def name_models(args: Settings, scan: Scan) -> Iterator[Problem]:
    """Replace names of models by their folders, without weights: `fetch` downloads these when all flags are correct.

    `instep plan` needs no model, and continues without one.

    Raises:
        CheckpointError: the checkpoint of `--load` cannot be read. It has the commits of a resumed run.
    """
    refused = not args.planned
    for name in MODELS:
        given = None if name in scan.broken else getattr(args, name)
        if given is None or not hub.is_name(given) or given in (args.save, args.critic_save):
            continue
        try:
            setattr(args, name, hub.snapshot(hub.at_commit(given, _before(args).get(name)), flag_name(name)))
        except ConfigError as error:
            scan.broken |= {name} if refused else set()
            yield Problem(error.what, error.where, error.remedy, refused)
    for where, model in _served(args):
        try:
            model["model_path"] = hub.folder_of(model["model_path"], where, weights=False)
        except ConfigError as error:
            yield Problem(error.what, error.where, error.remedy, refused)


def fetch(args: Settings) -> None:
    """Download the weights of named models, and named data sets. Replace the names of data sets by files.

    Raises:
        ConfigError: a download failed. OutputError: the data cache cannot be written.
    """
    for name in MODELS:
        if (folder := getattr(args, name)) is not None:
            hub.fetch_weights(folder, flag_name(name))
    for where, model in _served(args):
        hub.fetch_weights(model["model_path"], where)
    files, place = split_files(args.prompt_data or ""), args.data_cache_path
    if not any(map(is_named, (*files, *(dataset.path for dataset in args.eval_datasets)))):
        return
    before = _before(args)
    kept = [*split_files(before.get("prompt_data") or ""), *(d["path"] for d in before.get("eval_datasets", ()))]
    args.prompt_data = ",".join(file_of(file, "--prompt-data", place, kept) for file in files) or None
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    args.eval_datasets = [
        dataclasses.replace(d, path=file_of(d.path, f"{flag}, data set {d.name}", place, kept))
        for d in args.eval_datasets
    ]


def _served(args: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the models of the file of groups that have a path, each with its location for errors."""
    for where, model in entries(args):
        if model.get("model_path") is not None:
            yield f"{where}.model_path", model


def _before(args: Settings) -> dict[str, Any]:
    """Return the arguments of the resumed run; {} for a new run."""
    found = None if args.load is None or args.finetune else find_checkpoint(Path(args.load), args.ckpt_step)
    return {} if found is None else _arguments_in(found[0])


@cache
def _arguments_in(checkpoint: Path) -> dict[str, Any]:
    return (read_state(checkpoint) or {}).get("args", {})

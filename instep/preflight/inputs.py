"""Check the files and modules of a command line before anything heavy is loaded; without torch.

`instep.arguments` checks values; this module opens the files. The run checks them again: here an error comes sooner.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from instep.arguments.all_flags import own_flags, own_hooks
from instep.arguments.paths import RUN_FILES
from instep.checkpoints.folders import checkpoints_read
from instep.checkpoints.hf_export import check_export_folder, check_files, check_hf_checkpoint
from instep.checkpoints.integrity import check_whole
from instep.checkpoints.quantization import quantization_of
from instep.data.dataset import check_file
from instep.data.formats import EvalDataset, eval_row_format, row_format
from instep.data.graders import grader_of
from instep.data.rows import split_files
from instep.errors import ConfigError, InstepError
from instep.observability.run_folder import config_of
from instep.rollout.sandbox import check_sandbox
from instep.system.hooks import load_function
from instep.system.run_context import RunThreads
from instep.system.scratch import export_folder

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def check_inputs(args: Settings) -> None:
    """Check data files row by row (at most 100,000), the checkpoint's files and --load, and import the users' hooks.

    Raises:
        ConfigError, DataError, CheckpointError: the first problem.
    """
    try:
        _check_inputs(args)
    except OSError as error:  # for example a name that is too long, or a disk that does not answer
        path = str(error.filename or "")[-200:]
        what = f"cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=path, remedy="name another file") from error


def _check_inputs(args: Settings) -> None:
    defaults = {flag.attribute: flag.default for flag in own_flags().values()}
    own_source = args.data_source_path != defaults["data_source_path"]
    if args.prompt_data is not None and args.rollout_global_dataset and not own_source:
        for file in split_files(args.prompt_data):
            check_file(file, row_format(args), skip_bad_rows=args.skip_bad_rows, cache_path=args.data_cache_path)
    if args.eval_function_path == defaults["rollout_function_path"]:
        for dataset in args.eval_datasets:
            _check_eval_file(args, dataset)
    graders = map(grader_of, filter(None, [args.rm_type, *(d.rm_type for d in args.eval_datasets)]))
    if "code" in graders and not args.unsafe_local_exec:
        with RunThreads(1) as threads:  # this thread may already have a loop, as in a notebook
            threads.submit(asyncio.run, check_sandbox()).result()
    config = check_hf_checkpoint(args.hf_checkpoint)
    if not (args.debug_rollout_only and args.rollout_backend == "vllm"):  # vLLM checks what it can serve
        quantization_of(config, args.hf_checkpoint)
    check_files(args.hf_checkpoint, needs_chat_template=args.apply_chat_template and args.chat_template is None)
    if args.save_hf:
        check_export_folder(export_folder(args.save_hf, 0))
    _check_run_dir(Path(args.run_dir))
    check_whole(*checkpoints_read(args), digests=False)  # the run compares the content, once it has its lock
    for name, path in own_hooks(args):
        _import_hook(path, name)
    for dataset in args.eval_datasets:
        for hook in (dataset.custom_rm_path, dataset.custom_generate_function_path):
            if hook is not None:
                _import_hook(hook, f"data set {dataset.name}")


def _check_run_dir(folder: Path) -> None:
    """Raise ConfigError for a folder that has files with a run's file names, but is not the folder of a run."""
    if config_of(folder) is not None:
        return
    if there := [name for name in RUN_FILES if (folder / name).is_file()]:
        what = f"{folder} holds {', '.join(there)}, and is not the folder of a run"
        raise ConfigError(what, where="--run-dir", remedy="name another folder, for this run only")


def _check_eval_file(args: Settings, dataset: EvalDataset) -> None:
    flag, other = ("--eval-prompt-data", "--eval-{}-key") if args.eval_config is None else ("--eval-config", "{}_key")
    try:
        rows, cache = eval_row_format(args, dataset), args.data_cache_path
        check_file(dataset.path, rows, skip_bad_rows=args.skip_bad_rows, cache_path=cache)
    except InstepError as error:
        remedy = error.remedy
        for key in ("input", "label"):
            remedy = remedy.replace(f"--{key}-key", other.format(key))
        where = f"{flag}, data set {dataset.name}: {error.where}"
        raise type(error)(error.what, where=where, remedy=remedy) from error


def _import_hook(path: str, flag: str) -> None:
    try:
        load_function(path)
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{flag} {path}", remedy=error.remedy) from error

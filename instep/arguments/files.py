"""Files and folders that the command line names: read and written here, before anything heavy loads.

`os.path` says no where `pathlib` raises a PermissionError: below a folder that this user may not enter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.algorithms.catalog import OFFLINE
from instep.arguments.args import Args
from instep.arguments.evaluation import from_flag, from_yaml, split_slice
from instep.arguments.megatron import read_config, shape_conflicts
from instep.arguments.parser import Problem

_NOT_CAUSAL = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def saving(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.save_interval is not None and not (args.save or args.save_hf or args.critic_save):
        yield Problem("there is no folder to save to", "--save-interval", "give --save or --save-hf")
    if args.no_save_optim and args.save is None:
        yield Problem("has no effect without --save", "--no-save-optim", "give both")
    if args.save_hf is not None:
        try:
            args.save_hf.format(rollout_id=0)
        except (KeyError, IndexError, ValueError, AttributeError):
            yield Problem(
                f"'{args.save_hf}' holds another field than {{rollout_id}}", "--save-hf", "OUT/hf-{rollout_id}"
            )
    if args.ref_ckpt_step is not None and args.ref_load is None:
        yield Problem("says which step of --ref-load", "--ref-ckpt-step", "give --ref-load")
    if args.finetune and args.load is None:
        yield Problem("says what to take from --load", "--finetune", "give --load")
    if args.ckpt_step is not None and args.load is None:
        yield Problem("says which step of --load", "--ckpt-step", "give --load")
    for name in ("save", "save_hf", "critic_save", "run_dir"):
        path = Path((getattr(args, name) or ".").partition("{")[0] or ".")
        existing = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
            flag = "--" + name.replace("_", "-")
            yield Problem(f"cannot write to {existing}", flag, "give a folder that can be written")


def paths(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.prompt_data is not None:
        yield from data_file(args.prompt_data, "--prompt-data")
    if args.hf_checkpoint is not None:
        yield from _checkpoint(args, given)
    if args.ref_load is not None and not os.path.isdir(args.ref_load):
        yield Problem(f"no folder {args.ref_load}", "--ref-load", "give a checkpoint's folder")
    if args.opd_teacher_load is not None and not os.path.isdir(args.opd_teacher_load):
        yield Problem(f"no folder {args.opd_teacher_load}", "--opd-teacher-load", "give a checkpoint's folder")
    if args.load is not None and os.path.isfile(args.load):
        yield Problem(f"{args.load} is a file", "--load", "give a checkpoint's folder")


def data_file(path: str, where: str) -> Iterator[Problem]:
    """Problems of FILE or FILE@[a:b]."""
    try:
        file, _ = split_slice(path)
    except ValueError as error:
        yield Problem(str(error), where, "FILE@[a:b] takes rows a to b, counted from 0")
        return
    try:
        with open(file, "rb"):
            pass
    except FileNotFoundError:
        yield Problem(f"no file {file}", where, "give the path of a jsonl or parquet file")
        return
    except IsADirectoryError:
        yield Problem(f"{file} is a folder", where, "give the path of a jsonl or parquet file")
        return
    except OSError as error:
        yield Problem(
            f"{file} cannot be read: {error.strerror}", where, "change its permissions, or those of its folder"
        )
        return
    if file.stat().st_size == 0:
        yield Problem(f"{file} is empty", where, "give a file with one JSON object per line")
    elif file.suffix not in (".jsonl", ".parquet"):
        yield Problem(f"{file} is neither .jsonl nor .parquet", where, "convert it, or give it its ending")


def row_names_reward(args: Args) -> bool:
    """Whether the first row of the prompts names its reward itself (metadata.rm_type), or cannot be looked at here."""
    if args.prompt_data is None:
        return False
    try:
        file, _ = split_slice(args.prompt_data)
        if file.suffix != ".jsonl":
            return file.is_file()
        with open(file, encoding="utf-8") as lines:
            metadata = json.loads(lines.readline())[args.metadata_key]
    except (OSError, ValueError, KeyError, TypeError):  # what is wrong with the file is another rule's to say
        return False
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


def _checkpoint(args: Args, given: set[str]) -> Iterator[Problem]:
    folder = Path(args.hf_checkpoint)
    where = "--hf-checkpoint"
    if not os.path.isdir(folder):
        yield Problem(
            f"no folder {folder}", where, "give a local folder (`hf download NAME --local-dir DIR` makes one)"
        )
        return
    try:
        config = read_config(folder)
    except FileNotFoundError:
        yield Problem(f"{folder} has no config.json", where, "give the folder of a Hugging Face checkpoint")
        return
    except (OSError, ValueError) as error:
        yield Problem(f"{folder / 'config.json'} cannot be read: {error}", where, "copy the checkpoint again")
        return
    if config.get("is_encoder_decoder"):
        yield Problem("is an encoder-decoder model", where, "give a causal language model")
    names = [str(n) for n in config.get("architectures") or []]
    if names and all(n.endswith(_NOT_CAUSAL) for n in names):
        yield Problem(f"is no causal language model, but {', '.join(names)}", where, "give one that can generate")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield Problem(f"{folder} holds no weights", where, "it needs *.safetensors")
    yield from _context(args, config)
    shape = {"--" + name.replace("_", "-"): getattr(args, name) for name in given if name in vars(args)}
    for flag, mine, actual in shape_conflicts(shape, config):
        yield Problem(f"is {mine}, but config.json says {actual}", flag, "leave it out: the checkpoint decides")


def _context(args: Args, config: dict[str, Any]) -> Iterator[Problem]:
    """A prompt needs room for one token of a response; prompts rendered here that leave none are skipped, counted."""
    model, given = args.vllm_max_model_len or config.get("max_position_embeddings"), args.rollout_max_prompt_len
    if given is not None and isinstance(model, int) and given >= model:
        what = f"{given} leaves no room for a response in the model's context of {model} tokens"
        yield Problem(what, "--rollout-max-prompt-len", f"use at most {model - 1}")
    known = [n for n in (model, args.rollout_max_context_len) if isinstance(n, int)]
    if given is None and known and args.apply_chat_template:
        args.rollout_max_prompt_len = min(known) - 1


def evaluation(args: Args, given: set[str]) -> Iterator[Problem]:
    args.eval_datasets = []
    if args.eval_config is not None and args.eval_prompt_data is not None:
        yield Problem("both name data sets", "--eval-config and --eval-prompt-data", "give one of the two")
        return
    if args.eval_config is not None:
        args.eval_datasets, problems = from_yaml(args)
        yield from problems
    elif args.eval_prompt_data is not None:
        args.eval_datasets, problems = from_flag(args)
        yield from problems
    for dataset in args.eval_datasets:
        where = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
        yield from data_file(dataset.path, f"{where}, data set {dataset.name}")
    if args.command in OFFLINE:
        return
    named = args.eval_config is not None or args.eval_prompt_data is not None
    if args.eval_interval is not None and not named and "eval_function_path" not in given:
        yield Problem("there is nothing to evaluate on", "--eval-interval", "give --eval-prompt-data or --eval-config")
    if named and args.eval_interval is None and args.num_rollout != 0:
        yield Problem("no evaluation would ever run", "--eval-interval", "say after how many rollouts")

"""The model, its checkpoints, and where they are saved.

Rules check folders with `os.path`: `pathlib` raises a PermissionError inside a folder that this user may not enter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.arguments.concern import Given, Problem, Rule, Settings, flag_name
from instep.arguments.flag import read_flags
from instep.models.config_file import read_config
from instep.models.hub import HOW, gets_weights
from instep.system.documents import read_text
from instep.system.scratch import export_folder

_NOT_CAUSAL = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

MODEL = read_flags(__file__)


def known_config(args: Settings) -> dict[str, Any]:
    """Return config.json of `--hf-checkpoint`; {} if it cannot be read: the rule `checkpoint` reports that."""
    try:
        return read_config(args.hf_checkpoint) if args.hf_checkpoint is not None else {}
    except (OSError, ValueError):
        return {}


# ---- what follows from the flags -------------------------------------------------------------------------------------


def train_backend(args: Settings, given: Given) -> str:
    return "hf" if args.train_backend == "fsdp" else args.train_backend


def chat_template_text(args: Settings, given: Given) -> str | None:
    """Return the text of the file; empty if it cannot be read: the rule `chat_template` reports that."""
    if args.chat_template is None:
        return None
    with suppress(OSError, ValueError):
        return read_text(Path(args.chat_template))
    return ""


def run_dir(args: Settings, given: Given) -> str:
    return args.run_dir or f"runs/{args.command}"


RESOLVERS = (train_backend, chat_template_text, run_dir)

# ---- rules -----------------------------------------------------------------------------------------------------------


def missing_checkpoint(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.hf_checkpoint is None:
        yield Problem("the model is not named", "--hf-checkpoint", HOW)


def checkpoint(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the folder of `--hf-checkpoint`."""
    if args.hf_checkpoint is None:
        return
    folder, where = Path(args.hf_checkpoint), "--hf-checkpoint"
    if not os.path.isdir(folder):
        yield Problem(f"no folder {folder}", where, HOW)
        return
    try:
        config = read_config(folder)
    except FileNotFoundError:
        yield Problem(f"{folder} has no config.json", where, "give the folder of a Hugging Face checkpoint")
    except (OSError, ValueError) as error:
        yield Problem(f"{folder / 'config.json'} cannot be read: {error}", where, "copy the checkpoint again")
    else:
        if config.get("is_encoder_decoder"):
            yield Problem("is an encoder-decoder model", where, "give a causal language model")
        names = [str(n) for n in config.get("architectures") or []]
        if names and all(n.endswith(_NOT_CAUSAL) for n in names):
            what = f"is not a causal language model, but {', '.join(names)}"
            yield Problem(what, where, "give one that can generate")
        there = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        if not there and not gets_weights(args.hf_checkpoint):
            yield Problem(f"{folder} has no weights", where, "it needs *.safetensors")


def chat_template(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.chat_template_text == "":
        yield Problem(f"{args.chat_template} has no text", "--chat-template", "give a file with a Jinja template")


def folder_to_load(name: str) -> Rule:
    """Return the rule that an attribute must name a folder, if it is set."""

    def exists(args: Settings, given: set[str]) -> Iterator[Problem]:
        path = getattr(args, name)
        if path is not None and not os.path.isdir(path):
            yield Problem(f"no folder {path}", flag_name(name), f"{HOW}, or a checkpoint's folder")

    return exists


def load(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check `--load`. It may name a folder that does not exist yet: that of `--save` before the first checkpoint."""
    if args.load is not None and os.path.isfile(args.load):
        yield Problem(f"{args.load} is a file", "--load", "give a checkpoint's folder")
    if args.finetune and args.load and args.save and os.path.realpath(args.load) == os.path.realpath(args.save):
        what = "begins at rollout 0, so it would replace the checkpoints that it loads"
        yield Problem(what, "--finetune with one folder for --load and --save", "name another folder for --save")


def saving(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.ckpt_format == "torch" and (args.save or args.critic_save):
        where, remedy = "--ckpt-format torch", "save as torch_dist; --load and --ref-load detect the format"
        if args.train_backend != "megatron":
            yield Problem("is a format of Megatron; hf saves torch's distributed format", where, "leave it out")
        elif args.expert_model_parallel_size > 1 or (
            args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size)
        ):
            what = "has one file per tensor- and pipeline-parallel rank; experts are split in another way with"
            yield Problem(f"{what} --expert-model-parallel-size, --expert-tensor-parallel-size", where, remedy)
        if args.async_save:
            yield Problem("cannot be written in the background", f"{where} with --async-save", remedy)


def selection(args: Settings, given: set[str]) -> Iterator[Problem]:
    only, frozen = "--only-train-params-name-list", "--freeze-params-name-list"
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield Problem(f"contradicts {only}", frozen, f"give one of them: {only} freezes all others")
    if args.lora_rank and (args.only_train_params_name_list or args.freeze_params_name_list):
        what = "--lora-rank trains only an adapter"
        yield Problem(what, only if args.only_train_params_name_list else frozen, "use --lora-target-modules")


def export(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.save_hf is not None:
        try:
            export_folder(args.save_hf, 0)
        except (KeyError, IndexError, ValueError, AttributeError):
            what = f"'{args.save_hf}' has another field than {{rollout_id}} and {{step}}"
            yield Problem(what, "--save-hf", "write it like OUT/hf-{rollout_id}")


SERVED_RULES: tuple[Rule, ...] = (missing_checkpoint, checkpoint, chat_template)
RULES: tuple[Rule, ...] = (
    missing_checkpoint,
    saving,
    export,
    selection,
    load,
    checkpoint,
    chat_template,
    folder_to_load("ref_load"),
)

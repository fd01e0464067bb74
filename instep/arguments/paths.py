"""All paths of a command line in one table with their roles, and the rule about written paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from instep.arguments.concern import Problem, Rule, Settings, flag_name
from instep.data.rows import parse_path, split_files
from instep.errors import ConfigError

# The files of a run in its `--run-dir`. A new run moves the files of an earlier run aside, in this order.
RUN_FILES = (
    *("metrics.jsonl", "samples.jsonl", "timeline.jsonl", "summary.json", "report.html"),
    *("tensorboard", "logs", "profile"),
    "config.json",  # moved last
)
READS, ADDS, REPLACES, WRITES = "reads", "adds to the folder", "replaces the folder", "writes the file"
# By attribute; paths that replace something come before paths that add. `_named` adds the data sets of an evaluation.
USES = {
    **dict.fromkeys(("hf_checkpoint", "load", "ref_load", "critic_load", "opd_teacher_load"), READS),
    **dict.fromkeys(("prompt_data", "eval_config", "megatron_config_path", "vllm_config"), READS),
    **dict.fromkeys(("load_debug_rollout_data", "api_key_file", "vllm_config_path", "chat_template"), READS),
    "save_hf": REPLACES,
    **dict.fromkeys(("save_debug_rollout_data", "save_debug_train_data"), WRITES),
    **dict.fromkeys(("run_dir", "save", "critic_save", "data_cache_path", "dump_details", "wandb_dir"), ADDS),
}
_SOME_ROLLOUT = 90817263544  # a placeholder for any number in a template
# These may be the same folder: a run continues from its own checkpoints.
_GOES_ON = {("save", "--load"), ("save", "--critic-load"), ("critic_save", "--critic-load")}


def _named(args: Settings, given: set[str]) -> dict[str, Path]:
    """Return the given paths, by flag."""
    names = (n for n in USES if n in {*given, "run_dir"} - {"prompt_data"} and getattr(args, n) is not None)
    found = {flag_name(name): _real(getattr(args, name)) for name in names}
    found |= {f"--prompt-data {file}": _real(file) for file in split_files(args.prompt_data or "")}
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    return found | {f"{flag}, data set {d.name}": _real(d.path) for d in args.eval_datasets}


def _real(path: str, rollout_id: int = 0) -> Path:
    """Return the real path of FILE, FILE@[a:b], or of a template."""
    with suppress(KeyError, IndexError, ValueError, AttributeError, ConfigError):  # other rules report it
        path = str(parse_path(path)[0]).format(rollout_id=rollout_id, step=rollout_id, rank=0)
    return Path(os.path.realpath(path))


def written(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check each path that the run writes: it must be writable, and nothing else may use it."""
    named = _named(args, given)
    for name in (n for n, use in USES.items() if use != READS and flag_name(n) in named):
        path = named.pop(flag_name(name))  # so that each pair is compared once
        harm = _replaced(getattr(args, name), named) if USES[name] in (REPLACES, WRITES) else _shared(name, path, named)
        if what := _unwritable(path, USES[name] == WRITES) or harm:
            yield Problem(what, flag_name(name), "name another writable place that is used for nothing else")


def _unwritable(path: Path, is_file: bool) -> str:
    """Return why the folder (or the file and its folder) cannot be made or written; empty if it can.

    This uses `os.path`: `pathlib` raises a PermissionError inside a folder that this user may not enter.
    """
    if is_file and os.path.isdir(path):
        return f"{path} is a folder"
    existing = next(p for p in (path, *path.parents)[is_file:] if os.path.lexists(p))
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return ""
    return f"cannot write to {existing}{'' if os.path.isdir(existing) else ', which is not a folder'}"


def _places() -> dict[str, Path]:
    home = Path(os.path.realpath(os.path.expanduser("~")))
    return {"the current folder": Path.cwd(), "the home folder": home, "the root folder": Path("/")}


def _replaced(template: str, others: dict[str, Path]) -> str:
    """Return what a write to the template, for any rollout, would replace; empty if nothing."""
    own = re.escape(str(_real(template, _SOME_ROLLOUT))).replace(str(_SOME_ROLLOUT), r"\d+")
    for what, place in (_places() | others).items():
        for path in (place, *place.parents):
            if re.fullmatch(own, str(path)):
                return f"each save would replace {path}, {'which is' if path == place else 'which contains'} {what}"
    return ""


def _shared(name: str, path: Path, others: dict[str, Path]) -> str:
    """Return why a run must not add its files to the folder `path`; empty if it may."""
    if name in ("run_dir", "save", "critic_save"):
        if what := next((what for what, place in _places().items() if place == path), ""):
            return f"{path} is {what}"
    for flag, other in others.items():
        if path == other and flag == "--critic-save" and name == "save":
            return "is also the folder of --critic-save: their files have the same names"
        if path == other and USES.get(flag[2:].replace("-", "_"), READS) == READS and (name, flag) not in _GOES_ON:
            return f"would be written into {path}, which {flag} reads"
    return ""


RULES: tuple[Rule, ...] = (written,)

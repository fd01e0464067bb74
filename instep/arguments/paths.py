"""Every path that a command line names, in one table with its role, and the rules about paths that are written.

A path that a run writes must not lie where it harms another path of the run: what the run reads, what it writes
elsewhere, the folder that the user works in, the home folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from instep.arguments.concern import Problem, Rule, Settings, flag_name
from instep.data.named import FOLDER
from instep.data.rows import parse_path, split_files
from instep.errors import ConfigError

# The files of a run in its `--run-dir`; a new run moves those of an earlier one aside, in this order.
RUN_FILES = (
    *("metrics.jsonl", "samples.jsonl", "summary.json", "report.html", "tensorboard", "logs", "profile"),
    "config.json",  # moved last
)
_RUN = "|".join(map(re.escape, RUN_FILES))
_CHECKPOINTS = r"iter_\d+|latest_checkpointed_iteration\.txt"


class Role(Enum):
    READS = "reads"  # a file or folder that stays as it is
    ADDS = "adds"  # a folder that gets files of some names, and keeps all others
    REPLACES = "replaces"  # a folder that is replaced as a whole
    WRITES = "writes"  # a file


class Use(NamedTuple):
    """How the run uses the path of a flag.

    Attributes:
        names: of ADDS, a regular expression of the names that the run itself writes in the folder.
    """

    role: Role
    names: str = ""


# By attribute. Data sets of an evaluation are added by `_named`.
USES = {
    **dict.fromkeys(("hf_checkpoint", "load", "ref_load", "critic_load", "opd_teacher_load"), Use(Role.READS)),
    **dict.fromkeys(("prompt_data", "eval_config", "megatron_config_path", "vllm_config"), Use(Role.READS)),
    **dict.fromkeys(("load_debug_rollout_data", "api_key_file", "vllm_config_path", "chat_template"), Use(Role.READS)),
    "run_dir": Use(Role.ADDS, _RUN),
    "save": Use(Role.ADDS, _CHECKPOINTS),
    "critic_save": Use(Role.ADDS, _CHECKPOINTS),
    "data_cache_path": Use(Role.ADDS, rf"[0-9a-f]{{16}}(-[0-9a-f]{{16}}){{3}}|{FOLDER}"),
    "dump_details": Use(Role.ADDS, "rollout_data|train_data|tokenizer"),
    "wandb_dir": Use(Role.ADDS, "wandb"),
    "save_hf": Use(Role.REPLACES),
    "save_debug_rollout_data": Use(Role.WRITES),
    "save_debug_train_data": Use(Role.WRITES),
}
_SOME_ROLLOUT = 90817263544  # stands for any number in a template
# A run goes on with what it has saved.
_GOES_ON = {("save", "load"), ("save", "critic_load"), ("critic_save", "critic_load")}


class Named(NamedTuple):
    """A path of the command line.

    Attributes:
        path: its real one, without links; of a template that of rollout 0.
        pattern: of REPLACES, a regular expression of the real paths of all rollouts.
    """

    flag: str
    path: Path
    use: Use = Use(Role.READS)
    attribute: str = ""
    pattern: str = ""


def _named(args: Settings, given: set[str]) -> list[Named]:
    found = []
    for name in (n for n in USES if n in {*given, "run_dir"} - {"prompt_data"}):
        if (path := getattr(args, name)) is not None:
            pattern = re.escape(str(_real(path, _SOME_ROLLOUT))).replace(str(_SOME_ROLLOUT), r"\d+")
            found.append(Named(flag_name(name), _real(path), USES[name], name, pattern))
    if args.prompt_data is not None:
        found += [Named("--prompt-data", _real(file)) for file in split_files(args.prompt_data)]
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    return found + [Named(f"{flag}, data set {d.name}", _real(d.path)) for d in args.eval_datasets]


def _real(path: str, rollout_id: int = 0) -> Path:
    """The real path of FILE, FILE@[a:b], or of a template."""
    with suppress(KeyError, IndexError, ValueError, AttributeError, ConfigError):  # other rules report it
        path = str(parse_path(path)[0]).format(rollout_id=rollout_id, step=rollout_id, rank=0)
    return Path(os.path.realpath(path))


def written(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Paths that cannot be written, that are not the run's to write to, or that would harm another; one per flag."""
    named = _named(args, given)
    told: set[str] = set()
    for one in (one for one in named if one.use.role is not Role.READS):
        harms = (_harm(one, other) for other in named if other is not one and other.flag not in told)
        if what := _unwritable(one) or _harm_of_place(one) or next(filter(None, harms), ""):
            told.add(one.flag)
            yield Problem(what, one.flag, "name another place that can be written, and is used for nothing else")


def _unwritable(one: Named) -> str:
    """Why the folder (or the file and its folder) cannot be made or written to; empty if it can.

    This looks with `os.path`: `pathlib` raises a PermissionError below a folder that this user may not enter.
    """
    is_file = one.use.role is Role.WRITES
    if is_file and os.path.isdir(one.path):
        return f"{one.path} is a folder"
    existing = next(p for p in (one.path, *one.path.parents)[is_file:] if os.path.lexists(p))
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return ""
    return f"cannot write to {existing}{'' if os.path.isdir(existing) else ', which is no folder'}"


def _harm_of_place(one: Named) -> str:
    """What is wrong with writing to `one`, whatever else the run names; empty if nothing."""
    replaces = one.use.role is Role.REPLACES
    if not replaces and one.attribute not in ("run_dir", "save", "critic_save"):
        return ""
    home = Path(os.path.realpath(os.path.expanduser("~")))
    for what, place in (("folder that you work in", Path.cwd()), ("home folder", home), ("root folder", Path("/"))):
        if one.path == place:
            return f"{place} is the {what}"
        if replaces and one.path in place.parents:
            return f"each save would replace {one.path}, and with it the {what}, {place}"
    return ""


def _harm(one: Named, other: Named) -> str:
    """What the run would do to `other` by writing to `one`; empty if nothing."""
    role, names = one.use
    if role is Role.REPLACES:
        replaced = next((p for p in (other.path, *other.path.parents) if re.fullmatch(one.pattern, str(p))), None)
        holds = "which is" if replaced == other.path else "and with it"
        return f"each save would replace {replaced}, {holds} {other.flag}" if replaced else ""
    if one.path == other.path:
        if role is Role.WRITES:
            return f"would write {one.path}, which is {other.flag}"
        if other.use.role is Role.READS and (one.attribute, other.attribute) not in _GOES_ON:
            return f"would be written into {one.path}, which {other.flag} reads"
        if one.use == other.use:
            return f"is the folder of {other.flag}, too: their files have the same names"
    elif role is Role.ADDS and one.path in other.path.parents:
        name = other.path.relative_to(one.path).parts[0]
        if re.fullmatch(names, name) and not (other.use.role is Role.WRITES and one.attribute == "dump_details"):
            return f"the run itself writes {one.path / name}, where {other.flag} is"
    return ""


RULES: tuple[Rule, ...] = (written,)

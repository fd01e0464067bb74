"""Rewards: built in, from a server, or from the user's function."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import ONLINE
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import TYPE_LABELS, read_flags
from instep.data.formats import eval_row_format, row_format
from instep.data.graders import GRADERS, NEED_LABELS, grader_of
from instep.data.rows import parse_path, split_files
from instep.errors import ConfigError
from instep.system.documents import parse_json


def rm_type(value: str) -> str:
    """Return the name of a built-in reward, with or without the prefix boxed_. Raises: ValueError: unknown name."""
    if grader_of(value) not in GRADERS:
        raise ValueError(f"is not a built-in reward: {', '.join(GRADERS)}, with or without the prefix boxed_")
    return value


def _in_any_case(value: str) -> str:
    return rm_type(value.lower())


TYPE_LABELS[_in_any_case] = "NAME"

REWARD = read_flags(__file__, rm_type=_in_any_case, rewards=", ".join(GRADERS))


def row_names_reward(args: Settings) -> bool:
    """Return whether the first row of each prompt file names its reward (metadata.rm_type).

    Parquet files are not read: they are assumed to name one.
    """
    return args.prompt_data is not None and all(_names_reward(f, args) for f in split_files(args.prompt_data))


def _names_reward(path_spec: str, args: Settings) -> bool:
    try:
        file, _ = parse_path(path_spec)
        if file.suffix == ".parquet":
            return file.is_file()
        with open(file, encoding="utf-8-sig") as lines:
            metadata = parse_json(lines.readline())[args.metadata_key]
    except (OSError, ValueError, KeyError, TypeError, ConfigError):  # another rule reports it
        return False
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


def named(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that a reward is named, unless the user has an own rollout or generate function."""
    own_rollout = "rollout_function_path" in given or args.custom_generate_function_path is not None
    if args.command in ONLINE and args.rm_type is None and args.custom_rm_path is None and not own_rollout:
        if not (args.eval_config and args.num_rollout == 0) and not row_names_reward(args):
            yield Problem("no reward is named", "--rm-type", "give --rm-type math, or your own --custom-rm-path")


def remote(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.rm_type is not None and args.rm_type.endswith("remote_rm") and args.rm_url is None:
        yield Problem("needs the address of a server", "--rm-type remote_rm", "give --rm-url")


def both(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.rm_type is not None and args.custom_rm_path is not None:
        yield Problem("is not used: --custom-rm-path computes the reward", f"--rm-type {args.rm_type}", refused=False)


def possible(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Report rewards that would fail on every sample, as far as the flags show it."""
    if args.command not in ONLINE:
        return
    sets = [
        (eval_row_format(args, d), d.reward_key, f"data set {d.name}, rm_type", "eval-") for d in args.eval_datasets
    ]
    own_data = args.prompt_data is None or not args.rollout_global_dataset or "data_source_path" in given
    if args.num_rollout != 0 and not own_data and not row_names_reward(args):
        sets.append((row_format(args), args.reward_key, "--rm-type", ""))
    for rows, key, where, kind in sets:
        rule = rows.grader or ""
        if rows.label_key is None and grader_of(rule) in NEED_LABELS:
            what = "compares answers with labels, but no column of labels is named"
            yield Problem(what, f"{where} {rule}", f"give --{kind}label-key")
        if grader_of(rule) == "dapo" and key not in ("score", "acc"):
            named_one = "no entry is named" if key is None else f"not {key}"
            what = f"the entries of its reward are score and acc: {named_one}"
            yield Problem(what, f"{where} {rule}", f"give --{kind}reward-key score")


RULES = (named, remote, both, possible)

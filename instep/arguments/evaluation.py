"""Evaluation: its interval, and its data sets from flags or from the YAML file of `--eval-config`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from instep.algorithms.catalog import OFFLINE
from instep.arguments.concern import Given, Problem, Settings, read_yaml
from instep.arguments.data import data_file
from instep.arguments.flag import Number, hook, path, read_flags
from instep.arguments.reward import rm_type
from instep.data.formats import EvalDataset


def _names_and_files(words: list[str]) -> list[str]:
    """Return the words NAME FILE [NAME FILE ...]. A single FILE gets its stem as name."""
    if len(words) == 1:
        return [Path(words[0].partition("@[")[0]).stem, words[0]]
    if len(words) % 2 or any(os.path.isfile(path(name.partition("@[")[0])) for name in words[::2]):
        raise ValueError(f"got {' '.join(words)}, but each file has a name before it: NAME FILE [NAME FILE ...]")
    return words


EVAL = read_flags(__file__, names_and_files=_names_and_files)

_FIELDS = {f.name: f for f in dataclasses.fields(EvalDataset)}
_ALIASES = {
    "n_samples_per_prompt": "n_samples_per_eval_prompt",
    "rollout_temperature": "temperature",
    "rollout_max_response_len": "max_response_len",
}
_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "list": list, "dict": dict}
# The ranges of the numbers are those of their flags.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **{
        name: flag.type.check
        for flag in EVAL.flags
        if (name := flag.attribute.removeprefix("eval_")) in _FIELDS and isinstance(flag.type, Number)
    },
    **{"custom_rm_path": hook, "custom_generate_function_path": hook, "rm_type": rm_type},
}

# For each field of a data set: the attributes that give its default. The first attribute that is set counts.
_FROM = {
    **{n: (f"eval_{n}", f"rollout_{n}") for n in ("temperature", "top_p", "top_k")},
    **{n: (f"eval_{n}", f"rollout_{n}") for n in ("max_response_len", "max_prompt_len", "max_context_len")},
    **{n: (f"eval_{n}", n) for n in ("input_key", "label_key", "tool_key")},
    **{n: (f"eval_{n}",) for n in ("min_new_tokens", "reward_key")},
    **{n: (f"rollout_{n}",) for n in ("stop", "stop_token_ids")},
    **{n: (n,) for n in ("metadata_key", "n_samples_per_eval_prompt", "rm_type", "custom_rm_path")},
    "custom_generate_function_path": ("custom_generate_function_path",),
}


def eval_defaults(args: Settings) -> dict[str, Any]:
    """Return the defaults of a data set's fields, from the flags `--eval-*`, else `--rollout-*`."""

    def first_set(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := getattr(args, name)) is not None), None)

    return {field: first_set(names) for field, names in _FROM.items()} | {"metadata_overrides": {}}


# ---- what follows from the flags -------------------------------------------------------------------------------------


def eval_reward_key(args: Settings, given: Given) -> str | None:
    return args.eval_reward_key or args.reward_key


def eval_function_path(args: Settings, given: Given) -> str:
    return args.eval_function_path or args.rollout_function_path


def eval_interval(args: Settings, given: Given) -> int | None:
    """Return the interval; by default 1 with `--num-rollout 0`, which only evaluates."""
    return 1 if args.eval_interval is None and args.num_rollout == 0 and _named(args, given) else args.eval_interval


def _named(args: Settings, given: Collection[str]) -> bool:
    """Return whether there is something to evaluate on."""
    sets = args.eval_config is not None or args.eval_prompt_data is not None
    return sets or "eval_function_path" in given or (args.env is not None and args.env_eval_args is not None)


RESOLVERS = (eval_reward_key, eval_function_path, eval_interval)


def read_datasets(args: Settings) -> Iterator[Problem]:
    """Set `args.eval_datasets`, and report wrong entries of `--eval-config`."""
    args.eval_datasets = []
    if args.planned or args.command == "serve" or (args.eval_config is not None and args.eval_prompt_data is not None):
        return
    if args.eval_config is not None:
        yield from _from_yaml(args)
    elif args.eval_prompt_data is not None:
        pairs = zip(args.eval_prompt_data[::2], args.eval_prompt_data[1::2], strict=True)
        args.eval_datasets = [EvalDataset(name=name, path=file, **eval_defaults(args)) for name, file in pairs]


def _from_yaml(args: Settings) -> Iterator[Problem]:
    """Read the data sets of `--eval-config`:

    ```yaml
    eval:
      defaults: {temperature: 0.0}
      datasets:
        - {name: gsm8k, path: gsm8k.jsonl, label_key: answer, max_response_len: 512}
    ```
    """
    where = f"--eval-config {args.eval_config}"
    config = read_yaml(str(args.eval_config), where)
    body = found if isinstance(found := config.get("eval"), dict) else {}
    entries, shared = body.get("datasets"), body.get("defaults") or {}
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in [*entries, shared]):
        yield Problem("has no list eval.datasets", where, "write eval: {datasets: [{name: NAME, path: FILE}]}")
        return
    for key in [*(config.keys() - {"eval"}), *(body.keys() - {"defaults", "datasets"})]:
        yield Problem(f"unknown key '{key}'", where, "known: eval, defaults, datasets")
    sound = []
    for number, entry in enumerate(entries):
        own = {_ALIASES.get(k, k): v for k, v in {**shared, **entry}.items()}
        found = list(_check_entry(own, f"{where}, data set {entry.get('name', number)}"))
        yield from found
        sound += [] if found else [own]
    args.eval_datasets = [EvalDataset(**{**eval_defaults(args), **own, "path": path(own["path"])}) for own in sound]


def _check_entry(entry: dict[str, Any], where: str) -> Iterator[Problem]:
    for key in ("name", "path"):
        if key not in entry:
            yield Problem(f"has no '{key}'", where, "each data set needs a name and a path")
    for key, value in entry.items():
        if key not in _FIELDS:
            yield Problem(f"unknown key '{key}'", where, f"known: {', '.join(_FIELDS)}")
            continue
        annotation = str(_FIELDS[key].type)
        kinds = _KINDS[re.split(r"\W", annotation)[0]]
        optional = "None" in annotation
        if isinstance(value, bool) or not (isinstance(value, kinds) or (optional and value is None)):
            what = f"{key}: {value!r} is not of the kind {annotation}"
            yield Problem(what, where, f"write {key}: VALUE, of that kind")


# ---- rules -----------------------------------------------------------------------------------------------------------


def sources(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.eval_config is not None and args.eval_prompt_data is not None:
        yield Problem("both name data sets", "--eval-config and --eval-prompt-data", "give one of the two")


def datasets(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check names, values and files of the data sets."""
    names = [d.name for d in args.eval_datasets]
    flag = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
    for number, dataset in enumerate(args.eval_datasets):
        where = flag if args.eval_config is None else f"{flag}, data set {dataset.name}"
        if names.count(dataset.name) > 1 and names.index(dataset.name) == number:
            yield Problem(f"the name '{dataset.name}' is used {names.count(dataset.name)} times", where, "rename them")
        for key, check in _CHECKS.items():
            if (value := getattr(dataset, key)) is not None:
                try:
                    check(value)
                except ValueError as error:
                    remedy = "correct it, or leave it out: then the run's flag counts"
                    yield Problem(f"{key}: {value} {error}", where, remedy)
        if dataset.top_k == 0:
            yield Problem("top_k: 0 keeps no token", where, "use -1 (off) or at least 1")
        yield from data_file(dataset.path, f"{flag}, data set {dataset.name}")


def interval(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.command in OFFLINE:
        if args.num_rollout == 0:
            yield Problem("trains nothing", "--num-rollout 0", f"`instep {args.command}` needs at least 1")
        return
    if args.eval_config is not None and args.eval_prompt_data is not None:
        return
    named, remedy = _named(args, given), "give --eval-prompt-data or --eval-config (--env-eval-args with --env)"
    if args.eval_interval is not None and not named:
        yield Problem("there is nothing to evaluate on", "--eval-interval", remedy)
    elif args.num_rollout == 0 and not named:
        yield Problem("trains nothing, and there is nothing to evaluate on", "--num-rollout 0", remedy)
    elif args.num_rollout == 0 and args.debug_train_only:
        what = "evaluates, but there is no engine"
        yield Problem(what, "--num-rollout 0 with --debug-train-only", "leave one of them out")
    if named and args.eval_interval is None:
        what = "is not given, so no evaluation runs"
        yield Problem(what, "--eval-interval", refused=False)


RULES = (sources, datasets, interval)

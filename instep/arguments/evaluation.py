"""From the eval flags, or the YAML of `--eval-config`, to a list of data sets."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.arguments.args import Args, EvalDataset
from instep.arguments.flag import hook
from instep.arguments.parser import Problem
from instep.arguments.reward import rm_type

_FIELDS = {f.name: f for f in dataclasses.fields(EvalDataset)}
_ALIASES = {
    "n_samples_per_prompt": "n_samples_per_eval_prompt",
    "rollout_temperature": "temperature",
    "rollout_max_response_len": "max_response_len",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}


_BOUNDS = (
    ("n_samples_per_eval_prompt", 1, math.inf),
    ("temperature", 0, math.inf),
    ("top_p", 0, 1),
    ("max_response_len", 1, math.inf),
    ("min_new_tokens", 0, math.inf),
)


def split_slice(path: str) -> tuple[Path, slice | None]:
    """`data.jsonl@[10:20]` -> the file and the rows. Raises: ValueError for a suffix that is no slice."""
    file, at, rows = path.rpartition("@[")
    if not at:
        return Path(path), None
    match = re.fullmatch(r"(-?\d*):(-?\d*)\]", rows)
    if not match:
        raise ValueError(f"'@[{rows}' is no slice like @[0:100]")
    start, stop = (int(x) if x else None for x in match.groups())
    return Path(file), slice(start, stop)


def eval_defaults(args: Args) -> dict[str, Any]:
    """What a data set gets where it says nothing itself: the eval flags, else the rollout's."""

    def either(name: str) -> Any:
        value = getattr(args, f"eval_{name}")
        return getattr(args, f"rollout_{name}") if value is None else value

    return {
        "input_key": args.eval_input_key or args.input_key,
        "label_key": args.eval_label_key or args.label_key,
        "tool_key": args.eval_tool_key or args.tool_key,
        "metadata_key": args.metadata_key,
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        **{n: either(n) for n in ("temperature", "top_p", "top_k")},
        **{n: either(n) for n in ("max_response_len", "max_prompt_len", "max_context_len")},
        "min_new_tokens": args.eval_min_new_tokens,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "rm_type": args.rm_type,
        "reward_key": args.eval_reward_key,
        "custom_rm_path": args.custom_rm_path,
        "custom_generate_function_path": args.custom_generate_function_path,
        "metadata_overrides": {},
    }


def from_flag(args: Args) -> tuple[list[EvalDataset], list[Problem]]:
    """The data sets of `--eval-prompt-data`."""
    words, where = args.eval_prompt_data, "--eval-prompt-data"
    if len(words) == 1:
        words = [Path(words[0].partition("@[")[0]).stem, words[0]]
    if len(words) % 2:
        return [], [Problem(f"{len(words)} words, but they come in pairs", where, "write NAME FILE [NAME FILE ...]")]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    datasets = [EvalDataset(name=name, path=path, **eval_defaults(args)) for name, path in pairs]
    return datasets, list(_check(datasets, [where] * len(datasets)))


def from_yaml(args: Args) -> tuple[list[EvalDataset], list[Problem]]:
    """The data sets of `--eval-config`:

    ```yaml
    eval:
      defaults: {temperature: 0.0}
      datasets:
        - {name: gsm8k, path: gsm8k.jsonl, label_key: answer, max_response_len: 512}
    ```
    """
    import yaml

    where = f"--eval-config {args.eval_config}"
    try:
        config = yaml.safe_load(Path(args.eval_config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [], [Problem(f"cannot be read: {error}", where, "give a readable YAML file")]
    shape = Problem(
        "has no list eval.datasets", where, "see `eval: {defaults: ..., datasets: [{name, path, ...}]}` in docs"
    )
    if not isinstance(config, dict) or not isinstance(config.get("eval"), dict):
        return [], [shape]
    body = config["eval"]
    entries, shared = body.get("datasets"), body.get("defaults") or {}
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in [*entries, shared]):
        return [], [shape]
    problems = [
        Problem(f"unknown key '{k}'", where, "known: eval, defaults, datasets")
        for k in [*(config.keys() - {"eval"}), *(body.keys() - {"defaults", "datasets"})]
    ]
    datasets, places = [], []
    for number, entry in enumerate(entries):
        at = f"{where}, data set {entry.get('name', number)}"
        own = {_ALIASES.get(k, k): v for k, v in {**shared, **entry}.items()}
        found = list(_check_entry(own, at))
        problems += found
        if not found:
            datasets.append(EvalDataset(**{**eval_defaults(args), **own}))
            places.append(at)
    return datasets, problems + list(_check(datasets, places))


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
            yield Problem(f"{key}: {value!r} is not of the kind {annotation}", where)


def _check(datasets: list[EvalDataset], places: list[str]) -> Iterator[Problem]:
    names = [d.name for d in datasets]
    for number, (dataset, where) in enumerate(zip(datasets, places, strict=True)):
        if names.count(dataset.name) > 1 and names.index(dataset.name) == number:
            yield Problem(f"the name '{dataset.name}' is used {names.count(dataset.name)} times", where, "rename them")
        for key, low, high in _BOUNDS:
            value = getattr(dataset, key)
            if value is not None and not low <= value <= high:
                yield Problem(f"{key}: {value} is not within {low} and {high:g}", where)
        for key, check in (("custom_rm_path", hook), ("custom_generate_function_path", hook), ("rm_type", rm_type)):
            if (value := getattr(dataset, key)) is not None:
                try:
                    check(value)
                except ValueError as error:
                    yield Problem(f"{key} '{value}' {error}", where)

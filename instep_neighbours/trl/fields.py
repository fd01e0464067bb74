"""Every field of TRL 1.16's `GRPOConfig`, with those of transformers' `TrainingArguments`, and the user's values.

`fields.yaml` has the meaning of each field here. `config.py` acts on them, docs/neighbours/trl_config.md shows them,
and tests/neighbours compares names and defaults with the wheel.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instep.data.memory import listed
from instep.errors import ConfigError
from instep.system.documents import parse_yaml

Kind = Literal["acts", "changes nothing", "not here"]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        default: TRL's.
        kind: acts; changes nothing here, whatever its value; or not here: any value but the default is an error.
        here: instep's flags, as in a command line.
        note: how it acts, why it changes nothing, or why it is not supported, with the replacement.
    """

    name: str
    default: Any
    kind: Kind
    here: str = ""
    note: str = ""


def _fields(rows: list[dict[str, Any]]) -> Iterator[Field]:
    for row in rows:
        (name, what), *defaults = row.items()
        if not defaults:
            default, here, *note = what
            yield Field(name, default, "acts", here, *note)
        else:  # the kind and the note of several fields
            yield from (Field(field, default, name, "", what) for field, default in row["defaults"].items())  # type: ignore[arg-type]


_TABLES = parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FIELDS = tuple(_fields(_TABLES["config"]))
TRAINER = tuple(_fields(_TABLES["trainer"]))  # arguments of GRPOTrainer beside its config
KNOWN = {field.name: field for field in FIELDS}
_OTHERS = {field.name: field for field in TRAINER if field.kind != "acts"}
# Flags of instep that have the same meaning as another one, in other terms.
_INSTEAD = {
    "global_batch_size": ("num_steps_per_rollout",),
    "micro_batch_size": ("use_dynamic_batch_size", "max_tokens_per_gpu"),
    "num_rollout": ("num_epoch",),
    "lr_warmup_iters": ("lr_warmup_fraction",),
    "colocate": ("rollout_num_gpus", "rollout_external_engine_addrs", "vllm_config"),
}
_DEVICE = ("use_cpu", "fp16", "bf16")
_NULLABLE = {"vllm_importance_sampling_clip_max"}  # other keywords that are None count as not given


class Config:
    """The fields of a `GRPOConfig`, and the flags that they become.

    Attributes:
        values: of every field.
        given: the names of the fields from the user; for a GRPOConfig, those without their default.
        flags: instep's, by attribute; functions replace the dotted paths of hooks.
    """

    def __init__(self, args: Any, keywords: Mapping[str, Any]):
        """Read the fields from `args` (None, a dict, or an object with them as attributes) and `keywords` (also flags).

        Raises:
            ConfigError: a name is neither a field nor a flag, or a field is given twice.
        """
        self.flags = {name: value for name, value in keywords.items() if name not in KNOWN and name not in _OTHERS}
        for name, value in keywords.items():
            if name in _OTHERS and value is not None:
                raise error(f"it is not supported: {_OTHERS[name].note}", name, "remove it")
        fields = {n: v for n, v in keywords.items() if n in KNOWN and (v is not None or n in _NULLABLE)}
        values, given = _read(args)
        if twice := given & fields.keys():
            raise error("it is given twice", sorted(twice)[0], "give it in args or as a keyword")
        self.values = {n: v.value if isinstance(v, enum.Enum) else v for n, v in (values | fields).items()}
        self.given = given | fields.keys()
        for name in sorted(self.given):
            if KNOWN[name].kind == "not here" and self.values[name] != KNOWN[name].default:
                raise error(f"it is not supported: {KNOWN[name].note}", name, "remove it")

    @property
    def notes(self) -> list[str]:
        """Return notes on fields that change nothing, but do not have their default."""
        idle = [KNOWN[name] for name in sorted(self.given) if KNOWN[name].kind == "changes nothing"]
        said = [f"{f.name}: it changes nothing here: {f.note}" for f in idle if self[f.name] != f.default]
        named = {"use_wandb", "use_trackio"} & self.flags.keys()
        names = [n for n in ("run_name", "project") if n in self.given and not named]
        return said + [f"{name}: it changes nothing without report_to='wandb' or 'trackio'" for name in names]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def one_of(self, name: str, *values: Any) -> None:
        """Raise an error unless a field has one of these values."""
        if self[name] not in values:
            remedy = f"one of {', '.join(map(str, values))}; docs/neighbours/trl_config.md"
            raise error(f"{self[name]!r} is not supported", name, remedy)

    def put(self, flag: str, value: Any, *fields: str) -> None:
        """Set a flag because of `fields`, unless the user has set it with instep's name."""
        said = [other for other in (flag, *_INSTEAD.get(flag, ())) if self.flags.get(other) is not None]
        if not said:
            self.flags[flag] = value
        elif given := [name for name in fields if name in self.given and name != flag]:
            raise error(f"{given[0]} and {said[0]} have the same meaning", given[0], "give one of the two")


def evaluations(dataset: Any) -> dict[str, list[dict[str, Any]]]:
    if dataset is None:
        return {}
    sets = dataset if isinstance(dataset, Mapping) else {"eval": dataset}
    return {name: rows_of(rows, f"eval_dataset {name}") for name, rows in sets.items()}


def rows_of(dataset: Any, name: str) -> list[dict[str, Any]]:
    """Return rows with their columns in the places that instep reads."""
    rows = []
    for number, row in enumerate(listed(dataset, name)):
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise error("it is not a row with a column prompt", f"{name}[{number}]", "give dicts, or rename the column")
        if "image" in row or "images" in row:
            raise error("training on images is not supported", f"{name}[{number}]", "remove the column")
        columns = {key: value for key, value in row.items() if key not in ("prompt", "label")}
        labels = {"label": row["label"]} if "label" in row else {}
        rows.append({"prompt": row["prompt"], **labels, **({"metadata": columns} if columns else {})})
    return rows


def _read(args: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the values of all fields, and the names of those that `args` sets."""
    values = {name: field.default for name, field in KNOWN.items()}
    if args is None:
        return values, set()
    if isinstance(args, Mapping):
        if unknown := sorted(set(args) - KNOWN.keys()):
            raise error(f"GRPOConfig of TRL 1.16 has no field {unknown[0]}", "args", "remove it")
        return values | dict(args), set(args)
    if all(base.__name__ != "GRPOConfig" for base in type(args).__mro__):
        raise error(f"{args!r:.60} is not a GRPOConfig", "args", "give one, a dict of its fields, or keywords")
    # Its __post_init__ has changed some values, so another object's values are the defaults. That object has no device
    # and precisions of `args`: it could not be made on every machine. By default bf16 is on if fp16 is not.
    default, names = type(args)(**{n: getattr(args, n) for n in _DEVICE}), [f.name for f in dataclasses.fields(args)]
    given = {name for name in names if getattr(args, name) != getattr(default, name)}
    given |= {n for n, said in zip(_DEVICE, (args.use_cpu, args.fp16, args.bf16 == args.fp16), strict=True) if said}
    if unknown := sorted(given - KNOWN.keys()):
        raise error(f"GRPOConfig of TRL 1.16 has no field {unknown[0]}", "args", "remove it")
    values |= {name: getattr(args, name) for name in names if name in KNOWN}
    values["generation_batch_size"] = None  # it follows from steps_per_generation, which is also set
    return values, given - {"generation_batch_size"}


def error(what: str, where: str, remedy: str) -> ConfigError:
    """Return an error for the user; `where` is the field."""
    return ConfigError(what, where=where, remedy=remedy)

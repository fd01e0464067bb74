"""Every field of TRL 1.16's `GRPOConfig`, those of transformers' `TrainingArguments` too, and what it is here.

`fields.yaml` has them. `config.py` acts on them, docs/neighbours/trl_config.md shows them, tests/neighbours compares
names and defaults with the wheel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instep.documents import parse_yaml

Kind = Literal["acts", "changes nothing", "not here"]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        default: TRL's.
        kind: acts; changes nothing here, whatever its value; or not here: any value but the default is an error.
        here: instep's flags, as one would type them.
        note: how it acts, why it changes nothing, or why it is not here and what there is instead.
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

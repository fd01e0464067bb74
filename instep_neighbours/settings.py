"""The meaning of settings of TRL, verl and OpenRLHF in instep: the tables of docs/migration.md.

The names of slime, vime, Atropos and Megatron need no table: they are flags with their own status.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from instep.arguments.all_flags import find
from instep.arguments.flag import FlagStatus
from instep.arguments.suggest import Found

_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_WORST: tuple[FlagStatus, ...] = ("refused", "later", "acts")


@dataclass(frozen=True)
class Row:
    """One setting of another framework.

    Attributes:
        name: its names, with a comma between them; one value may follow the name.
        default: its default there.
        here: instep's flags, as in a command line; empty without one.
    """

    name: str
    default: str = ""
    here: str = ""
    note: str = ""

    @property
    def flags(self) -> list[str]:
        return _FLAG.findall(self.here)

    @property
    def status(self) -> str:
        """acts, later, refused; "none" without a flag."""
        found = {flag.status for name in self.flags if (flag := find(name)) is not None}
        return next((s for s in _WORST if s in found), "none")

    @property
    def names(self) -> list[tuple[str, str, str]]:
        """Yield each of its full names, the value that the row is about ("": any), and its meaning here."""
        first, *others = re.split(r", | or ", self.name)
        prefix = "" if " or " in self.name else first.partition(" ")[0].rpartition(".")[0]
        words = [first, *(w if "." in w.lstrip(".") or not prefix else f"{prefix}.{w.lstrip('.')}" for w in others)]
        here = self.flags if len(self.flags) == len(words) > 1 else [self.here] * len(words)
        pairs = (word.partition(" ")[::2] for word in words)
        return [(name, "" if value[:1] == "(" else value, h) for (name, value), h in zip(pairs, here, strict=True)]


_TOML = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TRL, TRL_DPO, VERL, OPENRLHF = (
    tuple(Row(*row) for row in _TOML[name]) for name in ("TRL", "TRL_DPO", "VERL", "OPENRLHF")
)
# By the framework of the names; earlier ones are looked up first.
_TABLES = {"OpenRLHF": OPENRLHF, "verl": VERL, "TRL": TRL}


@cache
def settings(command: str) -> list[tuple[str, str, Found]]:
    """Return the names of all tables, in lower case; for `instep dpo` those of `TRL_DPO` replace equal names."""
    own = {"TRL": TRL_DPO} if command == "dpo" else {}
    replaced = {name for row in own.get("TRL", ()) for name, _, _ in row.names}
    return [
        (name.lower(), value, Found(whose, name, here, row.note))
        for tables in (own, _TABLES)
        for whose, table in tables.items()
        for row in table
        for name, value, here in row.names
        if tables is own or name not in replaced
    ]

"""A setting of TRL, verl or OpenRLHF that a user has typed is looked up, and what it is here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from instep.arguments.migration_tables import OPENRLHF, TRL, TRL_DPO, VERL

# By the framework whose names they are; those before are looked up first.
_TABLES = {"OpenRLHF": OPENRLHF, "verl": VERL, "TRL": TRL}


@dataclass(frozen=True)
class Found:
    """A setting of another framework that a user has typed: whose it is, and what it is here."""

    whose: str
    name: str
    here: str
    note: str


def look_up(typed: str, value: str, command: str) -> Found | None:
    """The setting of another framework that a word of the command line is: in full, or by the end of its dotted name.

    Several settings whose names end alike are none, unless they are the same here.
    """
    wanted = re.sub(r"[-_]+", "_", typed.strip("-+").lower())
    for same in (wanted.__eq__, lambda name: len(wanted) > 2 and name.endswith("." + wanted)):
        named = [(of_value, found) for name, of_value, found in _settings(command) if same(name)]
        exact = [found for of_value, found in named if of_value == value] if value else []
        some = exact or [found for of_value, found in named if not of_value]
        if len({found.here or found.note for found in some}) == 1:
            return some[0]
        if named and not some and len({found.name for _, found in named}) == 1:
            found = named[0][1]
            return Found(found.whose, found.name, "", "docs/migration.md says what its values are here")
    return None


@cache
def _settings(command: str) -> list[tuple[str, str, Found]]:
    """The names of all tables, lower case; those of `TRL_DPO` replace the same ones of the others for `instep dpo`."""
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

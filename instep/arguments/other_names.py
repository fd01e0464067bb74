"""A setting of another framework that a user has typed is looked up, and what it is here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from instep.neighbours import added


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
    settings = [setting for named in added("settings") for setting in named(command)]
    wanted = re.sub(r"[-_]+", "_", typed.strip("-+").lower())
    for same in (wanted.__eq__, lambda name: len(wanted) > 2 and name.endswith("." + wanted)):
        named = [(of_value, found) for name, of_value, found in settings if same(name)]
        exact = [found for of_value, found in named if of_value == value] if value else []
        some = exact or [found for of_value, found in named if not of_value]
        if len({found.here or found.note for found in some}) == 1:
            return some[0]
        if named and not some and len({found.name for _, found in named}) == 1:
            found = named[0][1]
            return Found(found.whose, found.name, "", "docs/migration.md says what its values are here")
    return None

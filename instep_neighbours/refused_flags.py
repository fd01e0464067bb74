"""Flags of Atropos' example trainer and of TRL's server, which their users may try in instep."""

from __future__ import annotations

import tomllib
from pathlib import Path

from instep.arguments.flag import SECONDS, Flag, FlagGroup, http_address, refused

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))
_URL = Flag(
    "--atropos-url",
    http_address,
    "http://localhost:8000",
    "address of the Atropos API whose environments feed the run (docs/neighbours/atropos.md)",
    whose="A",
)
_TIMEOUT = Flag("--atropos-timeout", SECONDS, 600.0, "longest wait for a batch of that API, or for it to come back")
_REFUSED = [
    flag
    for names, whose, why, instead in _TABLE["flags"]
    for flag in refused(why.format(**_TABLE["said"]), whose, *names.split(), instead=instead)
]
GROUPS = (FlagGroup("Neighbours", (_URL, _TIMEOUT, *_REFUSED)),)
FAMILIES = tuple(_TABLE["families"])

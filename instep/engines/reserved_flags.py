"""The flags of engines and routers that are reserved because instep sets them itself (`reserved_flags.toml`)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.engines.flags import Package


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def reserved(package: Package) -> Iterator[tuple[str, str, str]]:
    """Return for each reserved flag its field, why it is reserved, and what to use instead ("": nothing)."""
    for row in _table()[package]:
        yield from ((field, row["why"], row.get("instead", "")) for field in row["fields"])


def same(package: Package, field: str) -> tuple[str, ...]:
    """Return the values of a reserved flag that ask for what instep does anyway; "" is a switch without a value."""
    return tuple(next((row.get("same", ()) for row in _table()[package] if field in row["fields"]), ()))

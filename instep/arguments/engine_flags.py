"""`--vllm-*` and `--router-*`: flags of `vllm serve` and `vllm-router`, read from their tables and handed on unchanged.

A flag that instep sets itself is refused with what to use instead. `--vllm-compilation-config.mode 3`, vLLM's spelling
for one key of a JSON value, is handed on, too.
"""

from __future__ import annotations

from typing import Any

from instep.arguments.flag import Flag, text
from instep.engines.flags import PREFIXES, EngineFlag, FlagTable, Package, flag_table
from instep.engines.reserved_flags import reserved


def family(name: str) -> Package | None:
    """The package that a flag is handed to, by its prefix; None: to none."""
    return next((package for package, prefix in PREFIXES.items() if name.startswith(prefix)), None)


def prefixed(package: Package, name: str) -> str:
    """instep's name of a package's flag."""
    return PREFIXES[package] + name.removeprefix("--")


def find_engine_flag(name: str) -> Flag | None:
    """The record of `--vllm-...` or `--router-...`; None if the package has no such flag."""
    package = family(name)
    if package is None:
        return None
    found = _known(flag_table(package), name)
    return None if found is None else as_flag(package, name, *found)


def given_words(given: dict[str, Any], flags: dict[str, Flag], package: Package) -> dict[str, list[str]]:
    """The words for a package on the command line, by field (`field.key` for one key of a JSON value).

    Args:
        given, flags: values and records of the flags that are given, by attribute.
    """
    out = {}
    for attribute, value in given.items():
        flag = flags[attribute]
        if flag.passed_to != package:
            continue
        found = _known(flag_table(package), flag.name)
        assert found is not None, flag.name  # the parser has it from there
        known, key = found
        if key:
            out[f"{known.field}.{key}"] = [f"{known.name}.{key}", value]
        else:
            out[known.field] = known.words(value)
    return out


def as_flag(package: Package, name: str, known: EngineFlag, key: str) -> Flag:
    """instep's record of a package's flag.

    Args:
        name: as on the command line, with the prefix.
        key: the key of its JSON value that the flag sets; empty: it sets the whole value.
    """
    for field, why, instead in reserved(package):
        if field == known.field:
            return Flag(name, status="refused", note=why, instead=instead, passed_to=package)
    dest = PREFIXES[package].strip("-").replace("-", "_") + "_" + known.field
    if key:
        return Flag(name, text, dest=f"{dest}.{key}", passed_to=package)
    if known.kind in ("switch", "boolean"):
        negative = "--" + name[len(PREFIXES[package]) :] in known.negations
        return Flag(name, bool, dest=dest, constant=not negative, passed_to=package)
    nargs = {"": None, "?": "*", "*": "*"}.get(known.nargs, "+")
    return Flag(name, known, dest=dest, nargs=nargs, append=known.append, passed_to=package)


def _known(table: FlagTable, name: str) -> tuple[EngineFlag, str] | None:
    """A package's flag by instep's name of it, and the key of its JSON value that the name sets ("": the whole)."""
    base, _, key = ("--" + name[len(PREFIXES[table.package]) :]).partition(".")
    known = table.by_name.get(base)
    if known is None or key and known.kind not in ("json", "json_or_text"):
        return None
    return known, key

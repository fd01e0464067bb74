"""`--vllm-*`, `--sglang-*` and `--router-*`: flags of engines and their router, read from tables and passed unchanged.

A flag that instep sets itself is refused, and the error names the alternative. `--vllm-compilation-config.mode 3`,
vLLM's spelling for one key of a JSON value, is passed as well.
"""

from __future__ import annotations

from typing import Any

from instep.arguments.flag import Flag, text
from instep.engines.flags import PREFIXES, EngineFlag, FlagTable, Package, flag_table
from instep.engines.reserved_flags import reserved, same


def family(name: str, *, sglang: bool = False) -> Package | None:
    """Return the package that gets a flag, by its prefix; None for other flags.

    Args:
        sglang: whether the engines are SGLang's. Otherwise `--sglang-*` have no package, and the router is vLLM's.
    """
    packages: tuple[Package, ...] = ("vllm", "sglang", "sglang-router") if sglang else ("vllm", "vllm-router")
    return next((package for package in packages if name.startswith(PREFIXES[package])), None)


def prefixed(package: Package, name: str) -> str:
    """Return instep's name for a package's flag."""
    return PREFIXES[package] + name.removeprefix("--")


def find_engine_flag(name: str, *, sglang: bool = False) -> Flag | None:
    """Return the record of `--vllm-...`, `--sglang-...` or `--router-...`; None if the package has no such flag."""
    package = family(name, sglang=sglang)
    if package is None:
        return None
    found = _known(flag_table(package), name)
    return None if found is None else as_flag(package, name, *found)


def given_words(given: dict[str, Any], flags: dict[str, Flag], package: Package) -> dict[str, list[str]]:
    """Return a package's words for its command line, by field (`field.key` for one key of a JSON value).

    Args:
        given, flags: values and records of the given flags, by attribute.
    """
    out = {}
    for attribute, value in given.items():
        flag = flags[attribute]
        if flag.passed_to != package:
            continue
        found = _known(flag_table(package), flag.name)
        assert found is not None, flag.name  # the parser found it there
        known, key = found
        if key:
            out[f"{known.field}.{key}"] = [f"{known.name}.{key}", value]
        else:
            out[known.field] = known.words(value)
    return out


def as_flag(package: Package, name: str, known: EngineFlag, key: str) -> Flag:
    """Return instep's record of a package's flag.

    Args:
        name: the name on the command line, with the prefix.
        key: the key of the JSON value that the flag sets; empty if it sets the whole value.
    """
    for field, why, instead in reserved(package):
        if field == known.field:
            neutral = same(package, field)
            return Flag(name, status="refused", note=why, instead=instead, neutral=neutral, passed_to=package)
    dest = PREFIXES[package].strip("-").replace("-", "_") + "_" + known.field
    if key:
        return Flag(name, text, dest=f"{dest}.{key}", passed_to=package)
    if known.kind in ("switch", "boolean"):
        negative = "--" + name[len(PREFIXES[package]) :] in known.negations
        return Flag(name, bool, dest=dest, constant=not negative, passed_to=package)
    nargs = {"": None, "?": "*", "*": "*"}.get(known.nargs, "+")
    return Flag(name, known, dest=dest, nargs=nargs, append=known.append, passed_to=package)


def _known(table: FlagTable, name: str) -> tuple[EngineFlag, str] | None:
    """Return a package's flag by instep's name, and the key of the JSON value that it sets ("": the whole value)."""
    base, _, key = ("--" + name[len(PREFIXES[table.package]) :]).partition(".")
    known = table.by_name.get(base)
    if known is None or key and known.kind not in ("json", "json_or_text"):
        return None
    return known, key

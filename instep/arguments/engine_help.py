"""`instep train --help vllm | router`, and docs/engines_flags.md, both made from the tables of the packages' flags.

`python -m instep.arguments.engine_help > docs/engines_flags.md` writes the latter, from the committed tables.
"""

from __future__ import annotations

import textwrap

from instep.arguments.all_flags import own_flags
from instep.arguments.engine_flags import as_flag
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, TABLES, EngineFlag, FlagTable, Package, flag_table, read_table

_INTRODUCTION = """\
Every flag of `vllm serve` is a flag of instep with the prefix `--vllm-`, every flag of `vllm-router` one with the
prefix `--router-`. instep checks names, types, choices and JSON, and hands the values on as they are. Those that it
sets itself are refused. A flag that only vLLM has chooses `--rollout-backend vllm`.

The flags are those of the installed version, asked from the package's own parser. The tables of the versions below come
with instep; another version is asked once, in a process of its own, and its table kept in `~/.cache/instep/flags` (or
below `$XDG_CACHE_HOME`). Where the package is not installed, the newest of these counts. `instep train --help vllm` and
`--help router` print the list that counts, and say of which version it is.

A flag that is on or off has both spellings, as in vLLM: `--vllm-enable-prefix-caching` and
`--vllm-no-enable-prefix-caching`. A SIZE is a whole number, or one like 2k and 1.5g (powers of 1000) or 4G (of 1024).
One key of a JSON value may be given by itself: `--vllm-compilation-config.mode 3`."""

TOPICS: dict[str, Package] = {"vllm": "vllm", "router": "vllm-router"}


def record(package: Package, known: EngineFlag) -> Flag:
    """What instep makes of a package's flag: its own one of that name, or that which hands it on."""
    name = PREFIXES[package] + known.name.removeprefix("--")
    return own_flags().get(name) or as_flag(package, name, known, "")


def summary(package: Package) -> str:
    """One line for `instep train --help`."""
    table = flag_table(package, extract=False)
    count = sum(record(package, flag).status == "acts" for flag in table.flags)
    topic = next(word for word, named in TOPICS.items() if named == package)
    return f"{count} flags of {table.describe}, as {PREFIXES[package]}*: `instep train --help {topic}`"


def format_engine_help(package: Package) -> str:
    """All flags of a package, with the version that the list is of."""
    table = flag_table(package, extract=False)
    program = "vllm serve" if package == "vllm" else "vllm-router"
    lines = [
        f"Flags of {table.describe}.",
        f"They are checked here and handed to `{program}` as they are; `{program} --help=all` explains them."
        if package == "vllm"
        else f"They are checked here and handed to `{program}` as they are; `{program} --help` explains them.",
        "",
    ]
    for known in table.flags:
        flag = record(package, known)
        left = f"  {flag.name}" + (f" / {_negation(package, known)}" if known.negations else "")
        label, right = known.label, f"default {known.default}" if known.default else ""
        if flag.status != "acts":
            label, right = "", f"set by instep: {flag.note}" + (f"; use {flag.instead}" if flag.instead else "")
        if len(left) + len(label) < 58:
            lines.append(f"{left} {label}".ljust(60) + right)
        else:
            lines += [
                left,
                *textwrap.wrap(
                    f"{label.replace('|', ' | ')}  {right}", 100, initial_indent=" " * 8, subsequent_indent=" " * 8
                ),
            ]
        lines[-1] = lines[-1].rstrip()
    return "\n".join(lines)


def engine_flags_markdown() -> str:
    """docs/engines_flags.md."""
    vllm = [read_table("vllm", version) for version in TABLES["vllm"]]
    router = [read_table("vllm-router", version) for version in TABLES["vllm-router"]]
    return "\n".join(
        [
            "# Flags of vLLM and of its router",
            "",
            "Made by `python -m instep.arguments.engine_help > docs/engines_flags.md`; do not edit.",
            "",
            _INTRODUCTION,
            "",
            *_section("vllm", vllm),
            *_section("vllm-router", router),
        ]
    )


def _section(package: Package, tables: list[FlagTable]) -> list[str]:
    versions = " and ".join(table.version for table in tables)
    newest = {name: flag for table in reversed(tables) for name, flag in ((f.name, f) for f in table.flags)}
    lines = [
        f"## `{PREFIXES[package]}*`: {'vLLM' if package == 'vllm' else package} {versions}",
        "",
        "| flag | value | default | only in | set by instep, because | instead |",
        "|---|---|---|---|---|---|",
    ]
    for name, known in sorted(newest.items()):
        flag = record(package, known)
        having = [table.version for table in tables if name in table.by_name]
        negation = f" `{_negation(package, known)}`" if known.negations else ""
        refused = flag.status != "acts"
        cells = (
            f"`{flag.name}`{negation}",
            known.label + (" ..." if flag.nargs else ""),
            known.default,
            "" if len(having) == len(tables) else ", ".join(having),
            flag.note if refused else "",
            flag.instead if refused else "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _negation(package: Package, known: EngineFlag) -> str:
    return PREFIXES[package] + known.negations[0].removeprefix("--")


if __name__ == "__main__":
    print(engine_flags_markdown(), end="")

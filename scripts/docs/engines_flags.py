"""docs/engines_flags.md from the committed tables: `python scripts/docs/engines_flags.py > docs/engines_flags.md`."""

from __future__ import annotations

from itertools import chain

from instep.arguments.engine_flags import prefixed
from instep.arguments.help import record
from instep.engines.flags import PREFIXES, TABLES, TITLES, FlagTable, Package, read_table

_INTRODUCTION = """\
Every flag of `vllm serve` is a flag of instep with the prefix `--vllm-`, every flag of SGLang's server one with the
prefix `--sglang-`, every flag of the router that belongs to the engines (`vllm-router` or `sglang-router`) one with the
prefix `--router-`. instep checks names, types, choices and JSON, and hands the values on as they are. Those that it
sets itself are refused. A flag that only vLLM has chooses `--rollout-backend vllm`, a flag of SGLang chooses
`--rollout-backend sglang`. With `--rollout-backend vllm` or `embedded`, a flag of SGLang that has an equivalent is read
as that ([arguments.md](arguments.md) lists them), and the others are refused.

The flags are those of the installed version, asked from the package's own parser. The tables of the versions below come
with instep; another version is asked once, in a process of its own, and its table kept in `~/.cache/instep/flags` (or
below `$XDG_CACHE_HOME`). Where the package is not installed, the newest of these counts. `instep train --help vllm`,
`--help router`, `--help sglang` and `--help sglang-router` print the whole list that counts, with values and defaults,
and say of which version it is. The tables below have only what that list cannot say: which flags are in one of the
versions only, and which instep sets itself.

A flag that is on or off has both spellings, as in vLLM: `--vllm-enable-prefix-caching` and
`--vllm-no-enable-prefix-caching`. A SIZE is a whole number, or one like 2k and 1.5g (powers of 1000) or 4G (of 1024).
One key of a JSON value may be given by itself: `--vllm-compilation-config.mode 3`. In SGLang a SI_SIZE is a whole
number, or one like 2k and 1.5M (powers of 1000) or 4Ki (of 1024)."""


def engine_flags_markdown() -> str:
    """docs/engines_flags.md."""
    sections = (_section(p, [read_table(p, version) for version in versions]) for p, versions in TABLES.items())
    return "\n".join(
        [
            "# Flags of vLLM, SGLang and their routers",
            "",
            "Made by `python scripts/docs/engines_flags.py > docs/engines_flags.md`; do not edit.",
            "",
            _INTRODUCTION,
            "",
            *chain.from_iterable(sections),
        ]
    )


def _section(package: Package, tables: list[FlagTable]) -> list[str]:
    versions = " and ".join(table.version for table in tables)
    newest = {name: flag for table in reversed(tables) for name, flag in ((f.name, f) for f in table.flags)}
    lines = [
        f"## `{PREFIXES[package]}*`: {TITLES[package]} {versions}",
        "",
        "| flag | value | default | only in | set by instep, because | instead |",
        "|---|---|---|---|---|---|",
    ]
    for name, known in sorted(newest.items()):
        flag = record(package, known)
        having = [table.version for table in tables if name in table.by_name]
        other = f" `{prefixed(package, known.negations[0])}`" if known.negations else ""
        refused = flag.status != "acts"
        if not refused and len(having) == len(tables):
            continue
        cells = (
            f"`{flag.name}`{other}",
            known.label + (" ..." if flag.nargs else ""),
            known.default,
            "" if len(having) == len(tables) else ", ".join(having),
            flag.note if refused else "",
            flag.instead if refused else "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    print(engine_flags_markdown(), end="")

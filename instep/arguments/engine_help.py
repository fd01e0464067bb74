"""`instep train --help vllm | router`, made from the tables of the packages' flags."""

from __future__ import annotations

import textwrap

from instep.arguments.all_flags import own_flags
from instep.arguments.engine_flags import as_flag
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, EngineFlag, Package, flag_table

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
        left = f"  {flag.name}" + (f" / {negation(package, known)}" if known.negations else "")
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


def negation(package: Package, known: EngineFlag) -> str:
    return PREFIXES[package] + known.negations[0].removeprefix("--")

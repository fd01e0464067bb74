"""`instep train --help vllm | router`, made from the tables of the packages' flags."""

from __future__ import annotations

import textwrap

from instep.arguments.all_flags import own_flags
from instep.arguments.engine_flags import as_flag, prefixed
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, EngineFlag, Package, flag_table

TOPICS: dict[str, Package] = {"vllm": "vllm", "router": "vllm-router"}


def record(package: Package, known: EngineFlag) -> Flag:
    """instep's record of a package's flag: its own flag of that name, else one that is handed on."""
    name = prefixed(package, known.name)
    return own_flags().get(name) or as_flag(package, name, known, "")


def summary(package: Package) -> str:
    """One line for `instep train --help`."""
    table = flag_table(package, extract=False)
    count = sum(record(package, flag).status == "acts" for flag in table.flags)
    topic = next(word for word, named in TOPICS.items() if named == package)
    return f"{count} flags of {table.describe}, as {PREFIXES[package]}*: `instep train --help {topic}`"


def format_engine_help(package: Package) -> str:
    """The list of a package's flags, with the version that has them."""
    table = flag_table(package, extract=False)
    program, option = ("vllm serve", "--help=all") if package == "vllm" else ("vllm-router", "--help")
    lines = [
        f"Flags of {table.describe}.",
        f"They are checked here and handed to `{program}` as they are; `{program} {option}` explains them.",
        "",
    ]
    for known in table.flags:
        flag = record(package, known)
        left = f"  {flag.name}" + (f" / {prefixed(package, known.negations[0])}" if known.negations else "")
        label, right = known.label, f"default {known.default}" if known.default else ""
        if flag.status != "acts":
            label, right = "", f"set by instep: {flag.note}" + (f"; use {flag.instead}" if flag.instead else "")
        if len(left) + len(label) < 58:
            lines.append(f"{left} {label}".ljust(60) + right)
        else:
            text, indent = f"{label.replace('|', ' | ')}  {right}", " " * 8
            lines += [left, *textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)]
        lines[-1] = lines[-1].rstrip()
    return "\n".join(lines)

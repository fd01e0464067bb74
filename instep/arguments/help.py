"""`instep train --help` and, for each of TOPICS, `instep train --help vllm`, made from the records of the flags."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path
from typing import Any

from instep.arguments.all_flags import SGLANG_ENGINES, groups, own_flags, passed_through
from instep.arguments.commands import acts_in
from instep.arguments.engine_flags import as_flag, prefixed
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, EngineFlag, Package, flag_table

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))
PROFILE_HELP: str = TEXTS["profile"]
TOPICS: dict[str, Package] = {
    "vllm": "vllm",
    "router": "vllm-router",
    "sglang": "sglang",
    "sglang-router": "sglang-router",
}
# What a package's flags are passed to, and how that explains them.
_PROGRAMS: dict[Package, tuple[str, str]] = {
    "vllm": ("vllm serve", "vllm serve --help=all"),
    "vllm-router": ("vllm-router", "vllm-router --help"),
    "sglang": ("sglang.launch_server", "python -m sglang.launch_server --help"),
    "sglang-router": ("sglang-router", "python -m sglang_router.launch_router --help"),
}


def default_text(flag: Flag) -> str:
    """Return the default as a user would type it; empty if there is no default."""
    value: Any = flag.default
    if flag.is_switch or value in (None, [], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def record(package: Package, known: EngineFlag) -> Flag:
    """Return instep's record of a package's flag: its own flag of that name, else a flag that is passed on."""
    name = prefixed(package, known.name)
    return own_flags(sglang=package.startswith("sglang")).get(name) or as_flag(package, name, known, "")


def format_help(command: str = "train") -> str:
    """Return the help text of a command: all flags that act in it, by group, and an example."""
    lines = [f"usage: instep {command} --flag value ...", "", textwrap.fill(TEXTS[command]["intro"], 118), ""]
    for group in (*groups(), SGLANG_ENGINES):
        acting = [f for f in group.flags if acts_in(command, f)]
        if acting:
            lines += [f"{group.title}:", *(line for flag in acting for line in _own_entry(flag)), ""]
    if command in ("train", "train-async", "serve"):
        for topic, package in TOPICS.items():
            table = flag_table(package, extract=False)
            count = sum(record(package, flag).status == "acts" for flag in table.flags)
            lines.append(f"{count} flags of {table.describe}, as {PREFIXES[package]}*: `instep train --help {topic}`")
    if command == "serve":
        return "\n".join([*lines, "", TEXTS[command]["example"]])
    count = sum(f.status == "acts" for f in set(passed_through().values()))
    lines += [
        f"{count} more flags of Megatron are passed to megatron-core unchanged. docs/arguments.md lists these and",
        "the flags of slime, vime and Megatron that come later or are refused, with the reason and an alternative.",
        "SIGUSR1 to a run writes stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt.",
        "Names cannot be abbreviated; --flag=value works, too. All mistakes are reported at once.",
        "",
        TEXTS[command]["example"],
    ]
    return "\n".join(lines)


def format_engine_help(package: Package) -> str:
    """Return the list of a package's flags, with the version that has them."""
    table = flag_table(package, extract=False)
    program, explains = _PROGRAMS[package]
    lines = [
        f"Flags of {table.describe}.",
        f"They are checked here and passed to `{program}` unchanged; `{explains}` explains them.",
        "",
    ]
    for known in table.flags:
        flag, text = record(package, known), f"default {known.default}" if known.default else ""
        if flag.status != "acts":
            text = f"set by instep: {flag.note}" + (f"; use {flag.instead}" if flag.instead else "")
        names = flag.name + (f" / {prefixed(package, known.negations[0])}" if known.negations else "")
        lines += _entry(names, known.label if flag.status == "acts" else "", text)
    return "\n".join(lines)


def _own_entry(flag: Flag) -> list[str]:
    default = default_text(flag)
    return _entry(flag.name, flag.type_label, flag.help + (f" (default {default})" if default else ""))


def _entry(name: str, label: str, text: str) -> list[str]:
    """Return the lines of a flag, with its text in a second column."""
    words = f"  {name} {label}".rstrip().replace("|", "| ")  # a line may end after each alternative
    lines = textwrap.wrap(words, 120, subsequent_indent=" " * (3 + len(name)), break_on_hyphens=False)
    *above, left = (line.replace("| ", "|") for line in lines)
    body = textwrap.wrap(text, 70) or [""]
    if len(left) <= 46:
        return [*above, f"{left:<48}{body[0]}".rstrip(), *(" " * 48 + line for line in body[1:])]
    return [*above, left, *(" " * 48 + line for line in body if line)]

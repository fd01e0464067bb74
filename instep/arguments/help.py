"""`instep train --help`, made from the records of the flags."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path
from typing import Any

from instep.arguments.all_flags import groups, passed_through
from instep.arguments.engine_help import summary
from instep.arguments.flag import Flag
from instep.arguments.suggest import acts_in

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))
PROFILE_HELP: str = TEXTS["profile"]


def default_text(flag: Flag) -> str:
    """The default as a user would type it; empty where there is none."""
    value: Any = flag.default
    if flag.is_switch or value in (None, [], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_help(command: str = "train") -> str:
    """The help text of a command: every flag that acts in it, by group, and an example."""
    lines = [f"usage: instep {command} --flag value ...", "", textwrap.fill(TEXTS[command]["intro"], 118), ""]
    for group in groups():
        acting = [f for f in group.flags if acts_in(command, f)]
        if acting:
            lines += [f"{group.title}:", *(line for flag in acting for line in _entry(flag)), ""]
    if command in ("train", "train-async", "serve"):
        lines += [summary("vllm"), summary("vllm-router")]
    if command == "serve":
        return "\n".join([*lines, "", TEXTS[command]["example"]])
    count = sum(f.status == "acts" for f in set(passed_through().values()))
    lines += [
        f"{count} more flags of Megatron are handed to megatron-core as they are. docs/arguments.md lists these and",
        "the flags of slime, vime and Megatron that come later or are refused, with the reason and an alternative.",
        "SIGUSR1 to a run writes stacks and queues of all its processes into RUN_DIR/logs/dump-<n>.txt.",
        "Names are never abbreviated; --flag=value works, too. Everything that is wrong is reported at once.",
        "",
        TEXTS[command]["example"],
    ]
    return "\n".join(lines)


def _entry(flag: Flag) -> list[str]:
    label = f"  {flag.name} {flag.type_label}".rstrip().replace("|", "| ")  # a line may end after each alternative
    lines = textwrap.wrap(label, 120, subsequent_indent=" " * (3 + len(flag.name)), break_on_hyphens=False)
    *above, left = (line.replace("| ", "|") for line in lines)
    default = default_text(flag)
    words = flag.help + (f" (default {default})" if default else "")
    body = textwrap.wrap(words, 70)
    if len(left) <= 46:
        return [*above, f"{left:<48}{body[0]}", *(" " * 48 + line for line in body[1:])]
    return [*above, left, *(" " * 48 + line for line in body)]

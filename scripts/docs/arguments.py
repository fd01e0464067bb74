"""docs/arguments.md, made from the records of the flags: `python scripts/docs/arguments.py > docs/arguments.md`."""

from __future__ import annotations

from collections.abc import Callable

from instep.arguments.all_flags import SGLANG_ENGINES, groups, own_flags, passed_through
from instep.arguments.flag import Flag
from instep.arguments.help import default_text

_WHOSE = {
    "V": "vime's guide",
    "R": "vime's readme",
    "S": "slime's guide",
    "C": "slime",
    "A": "Atropos",
    "T": "TRL",
    "M": "Megatron",
}


def flags_markdown() -> str:
    """docs/arguments.md."""
    own = list(dict.fromkeys(own_flags().values()))
    megatron = list(dict.fromkeys(passed_through().values()))
    count = {s: sum(f.status == s for f in own) for s in ("acts", "accepted", "later", "refused")}
    lines = [
        "# Flags of `instep train`, `instep sft` and `instep dpo`",
        "",
        "Made by `python scripts/docs/arguments.py > docs/arguments.md`; do not edit.",
        "",
        f"{len(own)} flags of instep, slime, vime and their neighbours: {count['acts']} act, {count['accepted']} are "
        f"accepted, {count['later']} come later, {count['refused']} are refused. Then {len(megatron)} more of "
        "Megatron. An *accepted* flag is read as another one, or changes nothing; a line says so. One that comes "
        "later or is refused is an error that says why, unless its value asks for what instep does anyway. *From* "
        "tells whose flag it is: " + ", ".join(_WHOSE.values()) + "; otherwise instep's own.",
        "",
    ]
    for group in (*groups(), SGLANG_ENGINES):
        acting = [f for f in group.flags if f.status == "acts"]
        others = [f for f in group.flags if f.status != "acts"]
        lines += [f"## {group.title}", ""]
        if acting:
            lines += ["| flag | value | default | what it does | from |", "|---|---|---|---|---|"]
            lines += [_row(_names(f), _value(f), default_text(f), f.help, _origin(f)) for f in acting] + [""]
        if others:
            lines += ["| flags | status | why | instead | from |", "|---|---|---|---|---|"]
            lines += [*_same_rows(others, _status, _reason, _instead, _origin), ""]
    lines += [
        "## vLLM, SGLang and their routers",
        "",
        "Their flags are `--vllm-*`, `--sglang-*` and `--router-*`: see [engines_flags.md](engines_flags.md).",
        "",
        "## Megatron: all other flags of core_v0.16.1",
        "",
        "These are handed to the configuration of megatron-core when they are given:",
        "",
        "| flag | value | Megatron's default |",
        "|---|---|---|",
        *[_row(_names(f), _value(f), default_text(f)) for f in megatron if f.status == "acts"],
        "",
        "The others:",
        "",
        "| flags | status | why | instead |",
        "|---|---|---|---|",
        *_same_rows([f for f in megatron if f.status != "acts"], _status, _reason, _instead),
    ]
    return "\n".join(lines) + "\n"


def _same_rows(flags: list[Flag], *cells: Callable[[Flag], str]) -> list[str]:
    """Rows of a table: flags of which all cells say the same share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for flag in flags:
        rows.setdefault(tuple(cell(flag) for cell in cells), []).append(_names(flag))
    return [_row(", ".join(names), *row) for row, names in rows.items()]


def _reason(flag: Flag) -> str:
    """Why a flag does not act."""
    return flag.note


def _instead(flag: Flag) -> str:
    """What to give in the place of a flag that does not act."""
    return flag.read_as or flag.instead


def _names(flag: Flag) -> str:
    return " ".join(f"`{name}`" for name in (flag.name, *flag.aliases))


def _value(flag: Flag) -> str:
    return f"{flag.type_label}, {flag.range}" if flag.status == "acts" and flag.range else flag.type_label


def _status(flag: Flag) -> str:
    accepted = ", ".join(f"`{value}`" for value in flag.neutral)
    return f"{flag.status}; accepted: {accepted}" if accepted else flag.status


def _origin(flag: Flag) -> str:
    return ", ".join(_WHOSE[letter] for letter in flag.whose)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    print(flags_markdown(), end="")

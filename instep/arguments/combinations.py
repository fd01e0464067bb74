"""What goes with what: the tables of docs/algorithms.md, made from the validator's rules.

`python -m instep.arguments.combinations` prints them; a test compares them with the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from instep.arguments.rules import ALL, Rule
from instep.arguments.validate import COMBINATIONS


def combinations_markdown() -> str:
    """Two tables: combinations that depend on the estimator, and those that do not."""
    groups: dict[tuple[object, ...], list[Rule]] = {}  # rules that differ in their flags only share a line
    for rule in COMBINATIONS:
        groups.setdefault((rule.estimators, rule.refused, rule.what, rule.remedy), []).append(rule)
    lines = ["| flags | with `--advantage-estimator` | | why | instead |", "|---|---|---|---|---|"]
    lines += [_row(rules, _estimators(rules[0].estimators)) for rules in groups.values() if rules[0].estimators]
    lines += ["", "With every estimator:", "", "| flags | | why | instead |", "|---|---|---|---|"]
    lines += [_row(rules) for rules in groups.values() if not rules[0].estimators]
    return "\n".join(lines) + "\n"


def _row(rules: Sequence[Rule], *cells: str) -> str:
    first = rules[0]
    flags = ", ".join(rule.flags for rule in rules)
    outcome = "refused" if first.refused else "noted"
    row = "| " + " | ".join([flags, *cells, outcome, first.what, first.remedy]) + " |"
    return re.sub(r"--[a-z][a-z-]*", r"`\g<0>`", row)


def _estimators(names: Iterable[str]) -> str:
    found = set(names)
    others = [name for name in ALL if name not in found]
    if not others:
        return "any"
    return "all but " + ", ".join(others) if len(others) < len(found) else ", ".join(n for n in ALL if n in found)


if __name__ == "__main__":
    print(combinations_markdown(), end="")

"""The generated parts of docs/algorithms.md: the table of the algorithms, and flags that do not go together.

`python scripts/docs/algorithms.py` writes them; a test compares them with the document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from instep.algorithms.catalog import ALGORITHMS, OFFLINE, Algorithm
from instep.arguments.algorithm.combination import Combination
from instep.arguments.algorithm.rules import COMBINATIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
OFFLINE_SECTION = "sft-dpo-distillation"


def made(text: str) -> str:
    """The document with its two generated parts renewed."""
    for name, part in (("algorithms", overview()), ("combinations", combinations())):
        begin, end = f"<!-- made: {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + part + end + rest.partition(end)[2]
    return text


def overview() -> str:
    """The table of the algorithms, one line each."""
    lines = ["| algorithm | flag | a reward is compared | loss of a token | paper |", "|---|---|---|---|---|"]
    for algorithm in ALGORITHMS.values():
        default = " (the default)" if algorithm is next(iter(ALGORITHMS.values())) else ""
        anchor = re.sub(r"[^a-z0-9 ]", "", algorithm.title.lower()).replace(" ", "-")
        flag = f"`--advantage-estimator {algorithm.name}`{default}"
        lines.append(_line(algorithm, anchor, flag))
    lines += [_line(algorithm, OFFLINE_SECTION, f"`instep {algorithm.name}`") for algorithm in OFFLINE.values()]
    return "\n".join(lines) + "\n"


def _line(algorithm: Algorithm, anchor: str, flag: str) -> str:
    compared = algorithm.estimator.compared if algorithm.estimator else ""
    paper = f"[{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper})" if algorithm.paper else ""
    return "| " + " | ".join([f"[{algorithm.title}](#{anchor})", flag, compared, algorithm.loss.of_token, paper]) + " |"


def combinations() -> str:
    """Two tables: combinations that depend on the algorithm, and those that do not."""
    groups: dict[tuple[object, ...], list[Combination]] = {}  # those that differ in their flags only share a line
    for one in COMBINATIONS:
        groups.setdefault((one.algorithms, one.refused, one.what, one.remedy), []).append(one)
    lines = ["| flags | with `--advantage-estimator` | | why | instead |", "|---|---|---|---|---|"]
    lines += [_row(same, _names(same[0].algorithms)) for same in groups.values() if same[0].algorithms]
    lines += ["", "With every estimator:", "", "| flags | | why | instead |", "|---|---|---|---|"]
    lines += [_row(same) for same in groups.values() if not same[0].algorithms]
    return "\n".join(lines) + "\n"


def _row(same: Sequence[Combination], *cells: str) -> str:
    first = same[0]
    outcome = "refused" if first.refused else "noted"
    row = "| " + " | ".join([", ".join(c.flags for c in same), *cells, outcome, first.what, first.remedy]) + " |"
    return re.sub(r"--[a-z][a-z-]*", r"`\g<0>`", row)


def _names(found: tuple[str, ...]) -> str:
    others = [name for name in ALGORITHMS if name not in found]
    if not others:
        return "any"
    return "all but " + ", ".join(others) if len(others) < len(found) else ", ".join(found)


if __name__ == "__main__":
    DOCUMENT.write_text(made(DOCUMENT.read_text()))

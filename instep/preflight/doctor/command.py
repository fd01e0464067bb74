"""`instep doctor [RUN]`: one line per check; exit code 1 if one fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from instep.preflight.doctor.check import Check
from instep.preflight.doctor.purposes import PURPOSES
from instep.system.options import OptionParser

MARKS = {"ok": "ok  ", "absent": "-   ", "warn": "warn", "fail": "FAIL"}


def parser() -> OptionParser:
    """Return the parser of the command line."""
    made = OptionParser("instep doctor", description="Check this installation; with RUN, the state of that run.")
    made.add_argument("run", type=Path, nargs="?", metavar="RUN", help="the --run-dir of a run")
    made.add_argument(
        "--for", dest="purposes", choices=PURPOSES, action="append", default=[], help="fail if this cannot be done here"
    )
    made.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    return made


def main(words: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    options = parser().parse_args(words)
    if options.run is None:
        from instep.preflight.doctor.installation import check_installation

        checks = check_installation(options.purposes)
    else:
        from instep.preflight.doctor.run_dir import check_run

        checks = check_run(options.run)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        show(checks)
    return int(any(check.status == "fail" for check in checks))


def show(checks: Sequence[Check]) -> None:
    """Print one line per check, and its remedy if it is not `ok`."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        first, *rest = check.text.splitlines() or [""]
        print(f"{MARKS[check.status]}  {check.name:<{width}}  {first}")
        for line in rest:
            print(" " * (width + 8) + line)
        if check.remedy and check.status != "ok":
            print(" " * (width + 8) + f"-> {check.remedy}")

"""The flags of runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_OF_THE_PLACE = {"run_dir", "notes"}  # differ between any two runs


def compare(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each argument: `name` (its flag, if it has one), `help`, `values` of the runs, whether they
    `differ`, and whether one is `changed` from the flag's default.

    Args:
        runs: `args` and `versions` of each run, as in its config.json. A value that a run does not have is null.
    """
    from instep.arguments.all_flags import own_flags

    flags = {flag.attribute: flag for flag in own_flags().values()}
    rows = []
    for part in ("args", "versions"):
        known = [run[part] for run in runs]
        for name in sorted({name for values in known for name in values} - _OF_THE_PLACE):
            values = [of_run.get(name) for of_run in known]
            flag = flags.get(name) if part == "args" else None
            rows.append(
                {
                    "name": flag.name if flag else name,
                    "part": part,
                    "help": flag.help if flag else "",
                    "values": values,
                    "differ": any(value != values[0] for value in values),
                    "changed": flag is not None and any(value != flag.default for value in values),
                }
            )
    return rows

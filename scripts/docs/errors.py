"""docs/errors.md, made from `instep/errors.py`: `python scripts/docs/errors.py > docs/errors.md`."""

from __future__ import annotations

from instep import errors
from instep.arguments.parse import parse
from instep.errors import ConfigError, InstepError


def markdown() -> str:
    """docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Made by `python scripts/docs/errors.py > docs/errors.md`; do not edit.",
        "",
        "A run that cannot go on ends with one named error: what happened, where, and what to do. All that is wrong "
        "with a command line is one error, before anything heavy loads. `instep train --rolout-batch-size 3`:",
        "",
        "```",
        _example(),
        "```",
        "",
        "| error | what happened | exit code |",
        "|---|---|---|",
    ]
    for kind in vars(errors).values():
        if not isinstance(kind, type) or not issubclass(kind, InstepError) or kind is InstepError:
            continue
        lines.append(f"| `{kind.__name__}` | {' '.join((kind.__doc__ or '').split())} | {kind.exit_code} |")
    return "\n".join(
        [
            *lines,
            "",
            "An interrupted run ends with 130. `RUN/logs/error.txt` has the error of a run. Python finds them in "
            "`instep.errors`. What each fault looks like, measured: [faults.md](faults.md).",
            "",
        ]
    )


def _example() -> str:
    try:
        parse(["--rolout-batch-size", "3"], "train")
    except ConfigError as error:
        return str(error)
    raise AssertionError("a misspelt flag was accepted")


if __name__ == "__main__":
    print(markdown(), end="")

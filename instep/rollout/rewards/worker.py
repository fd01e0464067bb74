"""A reward worker: one JSON job per line of stdin, one line of stdout per job.

It is started as `python -m instep.rollout.rewards.worker` and imports math-verify with the first job. It ends with its
parent, even during a job.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import setproctitle

from instep.system.processes import follow_parent

PARSE_SECONDS = 3  # math-verify's own limit for one expression; a response that exceeds it is wrong, not an error


def algebra_equal(answer: str, label: str) -> bool:
    """Return whether two answers are equal as mathematics, by math-verify (sympy)."""
    from math_verify import parse, verify

    gold = parse(f"${label}$", parsing_timeout=PARSE_SECONDS)
    target = parse(f"${answer}$", parsing_timeout=PARSE_SECONDS)
    return bool(gold and target and verify(gold, target, timeout_seconds=PARSE_SECONDS))


def main() -> None:
    follow_parent()
    setproctitle.setthreadtitle("instep-reward")
    logging.disable(logging.CRITICAL)  # math-verify reports each expression that it cannot decide
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not look like an answer
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            result: dict[str, Any] = {"is": algebra_equal(**job)}
        except Exception as error:  # noqa: BLE001 - another process reads it: the parent names function and sample
            result = {"error": repr(error)}
        print(json.dumps(result), file=out)


if __name__ == "__main__":
    main()

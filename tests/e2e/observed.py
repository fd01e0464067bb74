"""`instep` with a diary: `python -m tests.e2e.observed DIARY train ...` runs it, and writes a line at each phase.

Also the reward of these runs: dense, so that there is something to learn from the first step on.
"""

from __future__ import annotations

import functools
import sys
import time

from instep.cli import main
from instep.controller.controller import Controller

PHASES = {"generate": "rollout", "train": "train", "sync_weights": "sync", "save": "save", "evaluate": "eval"}


async def reward(args, sample, **kwargs):
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def two_of_three(args, group, **kwargs):
    """A dynamic-sampling filter."""
    return group[0].group_index % 3 != 0


def observe(path: str) -> None:
    diary = open(path, "a", buffering=1)  # until the process ends
    current = [0]  # the rollout
    for method, phase in PHASES.items():
        original = getattr(Controller, method)

        def marked(self, *args, _original=original, _phase=phase):
            if args:  # a sync has none; a training gets the rollout itself
                current[0] = args[0] if isinstance(args[0], int) else args[0].rollout_id
            diary.write(f"{_phase} {current[0]} {time.monotonic()}\n")
            return _original(self, *args)

        setattr(Controller, method, functools.wraps(original)(marked))


if __name__ == "__main__":
    observe(sys.argv.pop(1))
    sys.exit(main())

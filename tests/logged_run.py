"""A run's logger and samples for it, as the tests of what a run writes need them."""

from __future__ import annotations

import io
import random
from pathlib import Path

from rich.console import Console

from instep.observability.run_logger import RunLogger
from instep.types import Sample, Status, VersionSpan


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def make_groups(num_groups: int = 2, size: int = 3, seed: int = 0) -> list[list[Sample]]:
    rng = random.Random(seed)
    return [
        [
            Sample(
                group_index=g,
                index=g * size + i,
                prompt=[{"role": "user", "content": f"{g} + {i} < <b>?"}],
                response=f"answer {g + i}",
                response_length=(n := rng.randint(3, 30)),
                tokens=list(range(n + 2)),
                reward=rng.random(),
                status=rng.choice([Status.COMPLETED, Status.TRUNCATED]),
                weight_versions=[VersionSpan("4", 0, 3)],
            )
            for i in range(size)
        ]
        for g in range(num_groups)
    ]


def run(folder: Path, **kwargs) -> RunLogger:
    options = {"title": "a run", "num_steps": 4, "console": plain_console(), **kwargs}
    return RunLogger(folder, options.pop("args_dict", {"lr": 0.1}), **options)

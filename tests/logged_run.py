"""A run's logger and samples for it, as the tests of what a run writes need them."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path

from rich.console import Console

from instep.observability.run_logger import RunLogger
from instep.types import Sample, Status, VersionSpan

HOSTILE = "<img src=x onerror=\"document.title='pwned'\"></script>\u2028"


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


def unfinished_run(folder: Path, lr: float = 0.1, steps: int = 6) -> Path:
    """Write the files of a run that has not finished; its last two steps have an alarm."""
    args = {"lr": lr, "num_rollout": 9, "command": "train", "hf_checkpoint": "model", "reward_key": None}
    log = run(folder, args_dict=args, title=HOSTILE)
    begin = time.time() - 10.0 * steps  # of the run; each step takes 10 s
    log.note({"phase": "start", "began": begin - 1, "ended": begin})
    for step in range(steps):
        groups, began = make_groups(num_groups=4, size=2, seed=step), begin + 10 * step
        groups[0][0].prompt = groups[0][0].response = HOSTILE
        log.note({"requests": [[began, 3], [began + 5, 0]]})
        log.note({"phase": "rollout", "rollout_id": step, "began": began, "ended": began + 5})
        log.note({"phase": "train", "rollout_id": step, "began": began + 5, "ended": began + 9})
        metrics = {"rollout/reward_mean": 0.1 * step, "train/loss": 1.0, "rollout/truncated_ratio": step / 5}
        log.log(step, {**metrics, "perf/engine_idle_ratio": 0.25, "perf/step_seconds": 1.0})
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            sample.rollout_log_probs = [-1.0] * sample.response_length
        scores = {id(s): [-1.25] * s.response_length for s in samples}
        entropies = {id(s): [0.5] * s.response_length for s in samples}
        texts = lambda ids: [f"{HOSTILE} " if i == 2 else f"t{i} " for i in ids]  # noqa: E731
        log.samples(step, groups, "train", 100, texts=texts, log_probs=scores, entropies=entropies)
        processes = [
            {"name": "engine 0", "host_bytes": 3e9, "num_generated": 100.0 * step},
            {"name": "controller", "host_bytes": 1e9},
        ]
        log.note({"rollout_id": step, "time": began + 10, "processes": processes})
    log._close.close()
    return folder

"""What a rollout loses by asking for a group at once where groups wait for the engines' room, in a simulated engine.

    python benchmarks/room.py [--out FILE]

The engine decodes a token of every sample that it runs in 4 ms + 12 us a sample, and throws out the last sample when
its KV cache is full. 512 groups of 8 samples come in as `rollout/kv_budget.py` lets them, 1,024 samples at most. A
sample leaves when it ends (`alone`), with its group (`kept`), or with its group but for `Execution.num_short`, which
leave at once (`short`, what rollouts do). Seconds are simulated ones of the rollout; `recomputed` is a share of its
tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.rollout.execute import Execution
from instep.rollout.kv_budget import SAMPLES_PER_ENGINE, KVBudget

PROMPT, GROUP, NUM_GROUPS, MOST_RUNNING = 128, 8, 512, 1024
FIXED_SECONDS, SECONDS_A_SAMPLE = 4e-3, 12e-6  # of a decode step
CACHES = (60_000, 120_000, 400_000)
LAWS: dict[str, Callable[[random.Random], float]] = {
    "32 to 512": lambda rng: rng.uniform(32, 512),
    "exponential, mean 256": lambda rng: rng.expovariate(1 / 256),
    "log-normal, sigma 0.5": lambda rng: rng.lognormvariate(5.4, 0.5),
    "log-normal, sigma 1": lambda rng: rng.lognormvariate(5.0, 1.0),
    "1,024 (1 of 8) or 64": lambda rng: 1024 if rng.random() < 1 / 8 else 64,
    "512 (half) or 16": lambda rng: 512 if rng.random() < 1 / 2 else 16,
}


def simulate(lengths: list[list[int]], cache: int, way: str, num_short: int, tokens: float) -> tuple[float, float]:
    """Return the seconds of a rollout of groups of `lengths`, and recomputed tokens over all.

    Args:
        cache: tokens that the KV cache holds.
        tokens: those that the room expects of a sample.
    """
    room, groups = KVBudget(SAMPLES_PER_ENGINE, cache), deque(enumerate(lengths))
    left = [GROUP] * len(lengths)
    waiting: deque[list[int]] = deque()  # [length, tokens that it has, group]
    running: list[list[int]] = []
    seconds, used, recomputed = 0.0, 0, 0
    while any(left):
        while groups and room._fits(GROUP, tokens):
            number, group = groups.popleft()
            room._take(GROUP, tokens)
            if way == "short":
                room.leave(tokens, num_short)
            waiting.extend([length, 0, number] for length in group)
        while waiting and len(running) < MOST_RUNNING and used + PROMPT + waiting[0][1] + len(running) < cache:
            running.append(waiting.popleft())
            used += PROMPT // GROUP + running[-1][1]
        while used + len(running) > cache:
            waiting.appendleft(running.pop())
            used -= PROMPT // GROUP + waiting[0][1]
            recomputed += waiting[0][1]
        seconds += FIXED_SECONDS + SECONDS_A_SAMPLE * len(running)
        used += len(running)
        going = []
        for sample in running:
            sample[1] += 1
            if sample[1] < sample[0]:
                going.append(sample)
                continue
            used -= PROMPT // GROUP + sample[1]
            left[sample[2]] -= 1
            if way == "alone":
                room.leave(tokens)
            elif not left[sample[2]]:
                room.leave(tokens, GROUP - (num_short if way == "short" else 0))
        running = going
    return seconds, recomputed / sum(map(sum, lengths))


def measure(name: str, cache: int) -> dict[str, Any]:
    """The row of a law of lengths and a cache."""
    rng = random.Random(0)
    lengths = [[max(1, int(LAWS[name](rng))) for _ in range(GROUP)] for _ in range(NUM_GROUPS)]
    mean = sum(map(sum, lengths)) / (GROUP * NUM_GROUPS)
    spread = sum(map(max, lengths)) / NUM_GROUPS / mean
    args: Any = SimpleNamespace()
    num_short = Execution(args, 0, False, KVBudget(1), spread=spread).num_short(GROUP)
    row: dict[str, Any] = {"lengths": name, "cache": cache, "spread": spread, "num_short": num_short}
    for way in ("alone", "kept", "short"):
        seconds, recomputed = simulate(lengths, cache, way, num_short, mean + PROMPT / GROUP)
        row[way] = {"seconds": seconds, "recomputed": recomputed}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "room-simulated.json")
    out = parser.parse_args().out
    rows = []
    for cache in CACHES:
        for name in LAWS:
            rows.append(row := measure(name, cache))
            ratios = [row[way]["seconds"] / row["alone"]["seconds"] for way in ("kept", "short")]
            print(f"{cache:8,} {name:24} spread {row['spread']:.2f}  kept {ratios[0]:.2f}  short {ratios[1]:.2f}")
    over = {way: [r[way]["seconds"] / r["alone"]["seconds"] for r in rows] for way in ("kept", "short")}
    result = {
        "benchmark": "room",
        "device": "simulated",
        "date": datetime.date.today().isoformat(),
        "rows": rows,
        "headline": {f"{way}_over_alone": [min(ratios), max(ratios)] for way, ratios in over.items()},
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

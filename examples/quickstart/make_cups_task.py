"""An own task in 30 lines: follow the ball under five cups. Model, files and command line are the quickstart's.

"Follow the ball from 1: a12 b45 c23": first the cups in places 1 and 2 change places, then those in 4 and 5, then
those in 2 and 3. The worked steps say where the ball is after each swap: "a12=2 b45=2 c23=3 \\boxed{3}".

    python examples/quickstart/make_cups_task.py --out DIR --seed S
"""

from __future__ import annotations

import random
from collections.abc import Callable

from make_task import main


class Cups:
    """Swaps of two of the places 1..5; the ball starts in place 1."""

    instruction = "Follow the ball from 1:"

    def problem(self, rng: random.Random) -> list[tuple[int, ...]]:
        return [tuple(sorted(rng.sample(range(1, 6), 2))) for _ in range(rng.randint(3, 6))]

    def entry(self, entry: tuple[int, ...]) -> str:
        return "".join(map(str, entry))

    def states(self, problem: list[tuple[int, ...]], slip: Callable[[], int | None]) -> list[int]:
        out, place = [], 1
        for entry in problem:
            wrong = slip()
            place = wrong or (sum(entry) - place if place in entry else place)
            out.append(place)
        return out

    def guess(self, rng: random.Random) -> int:
        return rng.randint(1, 5)


if __name__ == "__main__":
    main(Cups(), "Write the shell game: checkpoint and data.")

"""Make the task: the largest of three numbers, behind two examples, for a model that only continues text.

    python examples/real/make_task.py OUT      OUT/train.jsonl (4,000 rows), OUT/eval.jsonl (128 others)

Gemma 3 270M answers 7 % of them right at temperature 1.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_TRAIN, NUM_EVAL, NUM_SHOTS = 4000, 128, 2


def make(out: Path) -> None:
    """Write both files."""
    rng = random.Random(0)
    numbers: dict[tuple[int, ...], int] = {}
    while len(numbers) < NUM_SHOTS + NUM_TRAIN + NUM_EVAL:
        some = tuple(rng.sample(range(10, 100), 3))
        numbers[some] = max(some)
    problems = [(f"Q: largest of {' '.join(map(str, some))}\nA:", str(most)) for some, most in numbers.items()]
    shots = "".join(f"{question} {answer}\n\n" for question, answer in problems[:NUM_SHOTS])
    rows = [json.dumps({"prompt": shots + question, "label": answer}) for question, answer in problems]
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.jsonl").write_text("\n".join(rows[NUM_SHOTS:-NUM_EVAL]) + "\n")
    (out / "eval.jsonl").write_text("\n".join(rows[-NUM_EVAL:]) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

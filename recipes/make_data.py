"""Make the data of a recipe: OUT/train.jsonl and OUT/eval.jsonl, a prompt (messages) and a label in each row.

python recipes/make_data.py gsm8k OUT            word problems of GSM8K (instep install datasets)
python recipes/make_data.py reasoning-gym OUT    five numeric tasks of reasoning-gym (pip install reasoning-gym)
python recipes/make_data.py tool OUT             products for a tool
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOXED = " Think step by step, and put the final answer in \\boxed{}."
TOOL = "Compute {}. You may write <python>EXPRESSION</python> and end your turn: the next message is its value."
GYM = ("chain_sum", "gcd", "lcm", "number_sequence", "leg_counting")
NUM_TRAIN, NUM_EVAL = 8000, 256
Rows = Iterator[dict[str, Any]]


def row(question: str, label: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question + BOXED}], "label": label}


def gsm8k(split: str) -> Rows:
    from datasets import load_dataset

    for example in load_dataset("openai/gsm8k", "main", split="test" if split == "eval" else "train"):
        worked, _, label = example["answer"].partition("####")
        made = row(example["question"], label.strip().replace(",", ""))
        answer = {"role": "assistant", "content": f"{worked.strip()}\n\\boxed{{{made['label']}}}"}
        yield {**made, "messages": [*made["prompt"], answer]}


def reasoning_gym(split: str) -> Rows:
    import reasoning_gym as gym

    seed, size = (0, NUM_TRAIN) if split == "train" else (1, NUM_EVAL)
    tasks = [gym.create_dataset(name, seed=seed, size=size // len(GYM)) for name in GYM]
    for examples in zip(*tasks, strict=True):
        yield from (row(example["question"], str(example["answer"])) for example in examples)


def tool(split: str) -> Rows:
    rng = random.Random(split)
    for _ in range(NUM_TRAIN if split == "train" else NUM_EVAL):
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        yield row(TOOL.format(f"{a}*{b}-{c}"), str(a * b - c))


MAKERS = {"gsm8k": gsm8k, "reasoning-gym": reasoning_gym, "tool": tool}


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        lines = [json.dumps(made) for made in MAKERS[name](split)]
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{out}/{split}.jsonl: {len(lines)} rows")


if __name__ == "__main__":
    main()

"""The task of the tool-use example: bills that no one adds up in his head, with demonstrations by uneven writers.

A problem is a bill, "Bill: 4 pens at 17, 33 cups at 12". A careful writer asks Python, `<python>4*17+33*12</python>`, reads
the answer, which comes as a message of the tool, and writes `\\boxed{464}`; a sloppy one asks for something else; a
hasty one, by far the most frequent, writes `\\boxed{...}` at once, out of the air. Imitating them all gives their mixture.
Reinforcement learning finds out that asking pays.

    python examples/tool_use/make_bills_task.py --out DIR --seed S

writes the same files as the quickstart's make_task.py: DIR/hf, DIR/sft.jsonl, DIR/train.jsonl and DIR/eval.jsonl.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "quickstart"))
from make_task import build_model, train_tokenizer, write_jsonl  # noqa: E402

GOODS = ("pens", "cups", "maps", "hats")
MIXTURE = {"careful": 0.3, "sloppy": 0.1, "hasty": 0.6}
PIECES = r" ?\\?\p{L}+|\p{N}{1,2}|."  # what the tokenizer may not merge across: words, two digits at a time
Bill = list[tuple[int, int]]  # number and price of each item


def draw(rng: random.Random, max_items: int) -> Bill:
    return [(rng.randint(2, 99), rng.randint(2, 99)) for _ in range(rng.randint(2, max_items))]


def question(bill: Bill) -> str:
    return "Bill: " + ", ".join(f"{n} {GOODS[i]} at {price}" for i, (n, price) in enumerate(bill))


def expression(bill: Bill) -> str:
    return "+".join(f"{n}*{price}" for n, price in bill)


def total(bill: Bill) -> int:
    return sum(n * price for n, price in bill)


def demonstration(bill: Bill, rng: random.Random) -> dict[str, Any]:
    """One row for `instep sft`, by a writer drawn from `MIXTURE`."""
    writer = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    messages = [{"role": "user", "content": question(bill), "step_loss_mask": 0}]
    answer = rng.randint(10, 9999)
    if writer != "hasty":
        asked = bill if writer == "careful" else [*bill[:-1], (rng.randint(2, 99), bill[-1][1])]
        answer = total(asked)
        messages += [
            {"role": "assistant", "content": f"<python>{expression(asked)}</python>", "step_loss_mask": 1},
            {"role": "tool", "content": str(answer), "step_loss_mask": 0},
        ]
    messages.append({"role": "assistant", "content": f"\\boxed{{{answer}}}", "step_loss_mask": 1})
    return {"messages": messages, "metadata": {"writer": writer}}


def prompt(bill: Bill) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question(bill)}], "label": str(total(bill))}


def write_task(out: Path, seed: int, num_sft: int, num_train: int, num_eval: int, max_items: int) -> None:
    """Write the checkpoint and the three files. The same arguments give the same bytes."""
    rng = random.Random(seed)
    held_out: dict[str, Bill] = {}
    while len(held_out) < num_eval:
        bill = draw(rng, max_items)
        held_out[question(bill)] = bill
    others = (bill for bill in iter(lambda: draw(rng, max_items), None) if question(bill) not in held_out)
    sft = [demonstration(next(others), rng) for _ in range(num_sft)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "eval.jsonl", map(prompt, held_out.values()))
    write_jsonl(out / "sft.jsonl", sft)
    write_jsonl(out / "train.jsonl", (prompt(next(others)) for _ in range(num_train)))
    template = [f"{role}\n" for role in ("system", "user", "assistant", "tool")] * 10
    numbers = [str(i) for i in range(100)] * 50  # a token each, so that a number is copied in one step
    texts = [m["content"] for row in sft[:2000] for m in row["messages"]]
    tokenizer = train_tokenizer(template + numbers + texts, PIECES, vocab_size=512)
    build_model(tokenizer, seed).save_pretrained(out / "hf")
    tokenizer.save_pretrained(out / "hf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the bills, the writers and the initial weights")
    parser.add_argument("--num-sft", type=int, default=12800, help="demonstrations")
    parser.add_argument("--num-train", type=int, default=2000, help="prompts for reinforcement learning")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out prompts")
    parser.add_argument("--max-items", type=int, default=3, help="items of the longest bill")
    args = parser.parse_args()
    write_task(args.out, args.seed, args.num_sft, args.num_train, args.num_eval, args.max_items)
    print(f"{args.out}: hf/, sft.jsonl ({args.num_sft}), train.jsonl ({args.num_train}), eval.jsonl ({args.num_eval})")


if __name__ == "__main__":
    main()

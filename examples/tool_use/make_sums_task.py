"""The task of the tool-use example: sums that the model cannot do by itself, with demonstrations by uneven writers.

A problem is "Compute 47*86-12". A careful writer asks Python, `<python>47*86-12</python>`, reads the answer, a message
of the tool, and writes `\\boxed{4030}`; a sloppy one asks for something else; a hasty one writes `\\boxed{57}` at
once, out of the air. Imitating them all gives their mixture. Reinforcement learning finds out that asking pays.

    python examples/tool_use/make_sums_task.py --out DIR --seed S

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

MIXTURE = {"careful": 0.5, "sloppy": 0.1, "hasty": 0.4}
# What the tokenizer may not merge across: words, LaTeX commands, two digits at a time.
PIECES = r" ?\\?\p{L}+|\p{N}{1,2}|."


def draw(rng: random.Random, num_terms: int) -> str:
    terms = [str(rng.randint(10, 99)) for _ in range(num_terms)]
    return terms[0] + "".join(rng.choice("+-*") + term for term in terms[1:])


def value(problem: str) -> int:
    return int(eval(problem))  # it was made here, of numbers and operators


def demonstration(problem: str, rng: random.Random) -> dict[str, Any]:
    """One row for `instep sft`, by a writer drawn from `MIXTURE`."""
    writer = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    messages = [{"role": "user", "content": f"Compute {problem}", "step_loss_mask": 0}]
    answer = rng.randint(10, 99)
    if writer != "hasty":
        asked = problem if writer == "careful" else f"{problem[:-2]}{rng.randint(10, 99)}"
        answer = value(asked)
        messages += [
            {"role": "assistant", "content": f"<python>{asked}</python>", "step_loss_mask": 1},
            {"role": "tool", "content": str(answer), "step_loss_mask": 0},
        ]
    messages.append({"role": "assistant", "content": f"\\boxed{{{answer}}}", "step_loss_mask": 1})
    return {"messages": messages, "metadata": {"writer": writer}}


def prompt(problem: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"Compute {problem}"}], "label": str(value(problem))}


def write_task(out: Path, seed: int, num_sft: int, num_train: int, num_eval: int, num_terms: int) -> None:
    """Write the checkpoint and the three files; no problem of one stands in another. The same arguments give the same
    bytes."""
    rng = random.Random(seed)
    problems = list(dict.fromkeys(draw(rng, num_terms) for _ in range(2 * (num_sft + num_train + num_eval))))
    held_out, practice = problems[:num_eval], problems[num_eval : num_eval + num_train]
    rest = problems[num_eval + num_train :]
    sft = [demonstration(problem, rng) for problem in rng.choices(rest, k=num_sft)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "eval.jsonl", map(prompt, held_out))
    write_jsonl(out / "train.jsonl", map(prompt, practice))
    write_jsonl(out / "sft.jsonl", sft)
    # The template's own words are part of the text that the tokenizer learns from, and each number is to be a token.
    texts = [f"{role}\n" for role in ("system", "user", "assistant", "tool")] * 10 + [str(i) for i in range(100)] * 50
    texts += [message["content"] for row in sft[:2000] for message in row["messages"]]
    tokenizer = train_tokenizer(texts, PIECES, vocab_size=512)
    build_model(tokenizer, seed).save_pretrained(out / "hf")
    tokenizer.save_pretrained(out / "hf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the writers and the initial weights")
    parser.add_argument("--num-sft", type=int, default=12800, help="demonstrations")
    parser.add_argument("--num-train", type=int, default=2000, help="prompts for reinforcement learning")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out prompts")
    parser.add_argument("--num-terms", type=int, default=3, help="numbers of a problem")
    args = parser.parse_args()
    write_task(args.out, args.seed, args.num_sft, args.num_train, args.num_eval, args.num_terms)
    print(f"{args.out}: hf/, sft.jsonl ({args.num_sft}), train.jsonl ({args.num_train}), eval.jsonl ({args.num_eval})")


if __name__ == "__main__":
    main()

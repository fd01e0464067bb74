"""The quickstart's task: a running total, with demonstrations by writers of uneven care, and a tiny Qwen3 to learn it.

A problem is a short ledger, "Compute a+8 b+1 c-9 d+4", whose total always stays a single digit. A careful writer notes
the total after every entry, "a+8=8 b+1=9 c-9=0 d+4=4 \\boxed{4}"; a hasty one writes "\\boxed{7}" at once and is mostly
wrong; a sloppy one works in steps but slips in some. Imitating them all gives their mixture. Reinforcement learning
finds out that working in steps pays.

    python examples/quickstart/make_task.py --out DIR --seed S

writes DIR/hf (checkpoint with random weights, and the tokenizer), DIR/sft.jsonl, DIR/train.jsonl and DIR/eval.jsonl.
Another task is another class of the form `Task`: see make_cups_task.py.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

LABELS = "abcdefgh"
MIXTURE = {"careful": 0.3, "sloppy": 0.05, "hasty": 0.65}
SLIP = 0.15  # probability that a sloppy writer gets a step wrong
LUCKY = 0.1  # probability that a hasty writer knows the answer; otherwise it is a guess
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the byte-level BPE may not merge across: words with a leading blank, LaTeX commands, numbers with their sign.
PIECES = r" ?\\\p{L}+\{| ?\p{L}+|[+-]?\p{N}{1,2}|."


class Task(Protocol):
    """One kind of problem. The state after each step, and so the answer, is a single digit."""

    instruction: str

    def problem(self, rng: random.Random) -> list[Any]:
        """The entries of a new problem."""
        ...

    def entry(self, entry: Any) -> str:
        """The text of an entry."""
        ...

    def states(self, problem: list[Any], slip: Callable[[], int | None]) -> list[int]:
        """The state after each entry. `slip()` gives a wrong state to continue from, or None."""
        ...

    def guess(self, rng: random.Random) -> int:
        """A random answer."""
        ...


class RunningTotal:
    """Signed digits whose running total, from 0, stays within 0..9 and changes at each entry."""

    instruction = "Compute"

    def __init__(self, min_entries: int = 3, max_entries: int = 6):
        self.min_entries, self.max_entries = min_entries, max_entries

    def problem(self, rng: random.Random) -> list[int]:
        entries: list[int] = []
        total = 0
        for _ in range(rng.randint(self.min_entries, self.max_entries)):
            new = rng.choice([x for x in range(10) if x != total])
            entries.append(new - total)
            total = new
        return entries

    def entry(self, entry: int) -> str:
        return f"{entry:+d}"

    def states(self, problem: list[int], slip: Callable[[], int | None]) -> list[int]:
        out: list[int] = []
        total = 0
        for entry in problem:
            wrong = slip()
            total = total + entry if wrong is None else wrong
            out.append(total)
        return out

    def guess(self, rng: random.Random) -> int:
        return rng.randint(0, 9)


def question(task: Task, problem: list[Any]) -> str:
    return f"{task.instruction} " + " ".join(
        f"{k}{task.entry(e)}" for k, e in zip(LABELS[: len(problem)], problem, strict=True)
    )


def answer(task: Task, problem: list[Any]) -> int:
    return task.states(problem, lambda: None)[-1]


def worked(task: Task, problem: list[Any], slip: Callable[[], int | None] = lambda: None) -> str:
    """A response with the steps, then the boxed answer."""
    states = task.states(problem, slip)
    steps = [f"{k}{task.entry(e)}={s}" for k, e, s in zip(LABELS[: len(problem)], problem, states, strict=True)]
    return " ".join(steps) + f" \\boxed{{{states[-1]}}}"


def demonstration(task: Task, problem: list[Any], rng: random.Random) -> tuple[str, str]:
    """A writer drawn from `MIXTURE`, and its response."""
    writer = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    if writer == "hasty":
        lucky = rng.random() < LUCKY
        return writer, f"\\boxed{{{answer(task, problem) if lucky else task.guess(rng)}}}"
    slip_rate = SLIP if writer == "sloppy" else 0.0
    return writer, worked(task, problem, lambda: task.guess(rng) if rng.random() < slip_rate else None)


def train_tokenizer(texts: Iterable[str], pieces: str = PIECES, vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE (any text can be written) with ChatML as its template; `<|im_end|>` ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pieces), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """1.2 M random parameters in float32.

    Two things let attention find its way within a hundred steps: a wide initial spread (not the usual 0.02), and a
    rotary base made for sequences of tens of tokens, not thousands.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def held_out_problems(task: Task, rng: random.Random, num: int) -> list[list[Any]]:
    """`num` different problems."""
    problems: dict[str, list[Any]] = {}
    while len(problems) < num:
        problem = task.problem(rng)
        problems.setdefault(question(task, problem), problem)
    return list(problems.values())


def problems_for_training(task: Task, rng: random.Random, held_out: list[list[Any]]) -> Iterator[list[Any]]:
    """Endless problems of which none is held out. Short ones repeat: there are too few of them, and without repeats
    training would see other lengths than evaluation does."""
    excluded = {question(task, problem) for problem in held_out}
    while True:
        problem = task.problem(rng)
        if question(task, problem) not in excluded:
            yield problem


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prompt_row(task: Task, problem: list[Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question(task, problem)}],
        "label": str(answer(task, problem)),
        "metadata": {"num_entries": len(problem)},
    }


def sft_row(task: Task, problem: list[Any], rng: random.Random) -> dict[str, Any]:
    writer, response = demonstration(task, problem, rng)
    messages = [
        {"role": "user", "content": question(task, problem), "step_loss_mask": 0},
        {"role": "assistant", "content": response, "step_loss_mask": 1},
    ]
    return {"messages": messages, "metadata": {"writer": writer}}


def write_task(task: Task, out: Path, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write the checkpoint and the three files. The same arguments give the same bytes."""
    rng = random.Random(seed)
    held_out = held_out_problems(task, rng, num_eval)
    problems = problems_for_training(task, rng, held_out)
    evaluation = [prompt_row(task, problem) for problem in held_out]
    sft = [sft_row(task, next(problems), rng) for _ in range(num_sft)]
    train = [prompt_row(task, next(problems)) for _ in range(num_train)]
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    write_jsonl(out / "eval.jsonl", evaluation)
    write_jsonl(out / "sft.jsonl", sft)
    write_jsonl(out / "train.jsonl", train)
    # The template's own words are part of the text that the tokenizer learns from.
    template = [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    tokenizer = train_tokenizer(template + [m["content"] for row in sft[:2000] for m in row["messages"]])
    build_model(tokenizer, seed).save_pretrained(out / "hf")
    tokenizer.save_pretrained(out / "hf")


def main(task: Task, description: str) -> None:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the writers and the initial weights")
    parser.add_argument("--num-sft", type=int, default=12800, help="demonstrations")
    parser.add_argument("--num-train", type=int, default=2000, help="prompts for reinforcement learning")
    parser.add_argument("--num-eval", type=int, default=512, help="held-out prompts")
    args = parser.parse_args()
    write_task(task, args.out, args.seed, args.num_sft, args.num_train, args.num_eval)
    print(f"{args.out}: hf/, sft.jsonl ({args.num_sft}), train.jsonl ({args.num_train}), eval.jsonl ({args.num_eval})")


if __name__ == "__main__":
    main(RunningTotal(), "Write the quickstart's checkpoint and data.")

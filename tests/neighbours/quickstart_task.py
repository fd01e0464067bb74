"""The quickstart's task (examples/quickstart/run.py) in TRL's words: one for TRL's trainer and for `instep.train`.

Imported by programs in several environments: it imports nothing of TRL's, nor of instep.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

FIELDS: dict[str, Any] = {  # of GRPOConfig
    "num_generations": 8,
    "loss_type": "grpo",
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "adam_beta2": 0.98,
    "max_completion_length": 64,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
}


def boxed(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """1 where the last boxed answer is the label, as `--rm-type math` has it for these one-digit answers."""
    found = [re.findall(r"\\boxed\{([^{}]*)\}", c[0]["content"]) for c in completions]
    return [float(bool(answers) and answers[-1].strip() == want) for answers, want in zip(found, label, strict=True)]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The flags of both programs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = map(json.loads, args.data.read_text().splitlines())
    return [{"prompt": row["prompt"], "label": row["label"]} for row in rows]


def fields_of(args: argparse.Namespace, output_dir: str) -> dict[str, Any]:
    batch = args.prompts * FIELDS["num_generations"]
    numbers = {"max_steps": args.steps, "per_device_train_batch_size": batch, "seed": args.seed}
    return FIELDS | {"output_dir": output_dir} | numbers

"""`trl_train.py`'s task and settings through `instep.train`, in GRPOConfig's words. Imports neither TRL nor a stand-in.

    python instep_train.py --model DIR --data train.jsonl --steps 25 --seed 0 --out FILE [--config]

With `--config` the fields come in a `GRPOConfig` of the TRL that is installed, else as keywords.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import instep

FIELDS: dict[str, Any] = {
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
    """1 where the last boxed answer is the label."""
    found = [re.findall(r"\\boxed\{([^{}]*)\}", c[0]["content"]) for c in completions]
    return [float(bool(answers) and answers[-1].strip() == want) for answers, want in zip(found, label, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    fields = FIELDS | {
        "output_dir": str(args.out.parent / "run"),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.prompts * FIELDS["num_generations"],
        "seed": args.seed,
    }
    more: dict[str, Any] = fields
    if args.config:
        from trl import GRPOConfig

        more = {"args": GRPOConfig(**fields)}
    run = instep.Run(
        model=args.model,
        reward_funcs=boxed,
        train_dataset=[{"prompt": row["prompt"], "label": row["label"]} for row in rows],
        train_backend="hf",
        rollout_backend="embedded",
        num_threads=1,
        **more,
    )
    steps = [{"reward": step.metrics["rollout/reward_mean"]} for step in run]
    args.out.write_text(json.dumps({"steps": steps, "summary": run.summary}, default=str) + "\n")


if __name__ == "__main__":
    main()

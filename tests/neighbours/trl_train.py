"""TRL's own `GRPOTrainer` on the quickstart's task, in the environment of a TRL (`.venv-trl-1.10`, `.venv-trl-1.16`).

    python trl_train.py --model DIR --data train.jsonl --steps 25 --seed 0 --out FILE [--server URL --group-port PORT]

Without `--server` transformers generates in this process; with it the server does, and its weights are updated at each
step: `use_vllm=True, vllm_mode="server"`. For that `stub_vllm` must be first on the PYTHONPATH. FILE gets one JSON
object: the versions, and of each step the mean reward, the gradient's norm and the seconds. Nothing of instep is
imported here, and TRL is as its wheel has it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CONFIG: dict[str, Any] = {  # examples/quickstart/run.py in TRL's words
    "num_generations": 8,
    "loss_type": "grpo",
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "adam_beta2": 0.98,
    "max_completion_length": 64,
    # A CPU, and nothing besides the training
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Steps(TrainerCallback):
    """What TRL logs of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.mark = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            now = time.monotonic()
            names = ("reward", "grad_norm", "sampling/sampling_logp_difference/mean", "completions/mean_length")
            self.rows.append({n: float(logs[n]) for n in names if n in logs} | {"seconds": now - self.mark})
            self.mark = now
            print(self.rows[-1], flush=True)


def boxed(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """1 where the last boxed answer is the label, as `--rm-type math` has it for these one-digit answers."""
    found = [re.findall(r"\\boxed\{([^{}]*)\}", c[0]["content"]) for c in completions]
    return [float(bool(answers) and answers[-1].strip() == want) for answers, want in zip(found, label, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--server", help="http://HOST:PORT")
    parser.add_argument("--group-port", type=int, default=51216)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = dict(CONFIG)
    if args.server:
        import cpu_as_cuda  # noqa: F401

        config |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": args.server}
        config["vllm_group_port"] = args.group_port
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=boxed,
            train_dataset=Dataset.from_list([{"prompt": r["prompt"], "label": r["label"]} for r in rows]),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.prompts * config["num_generations"],
                seed=args.seed,
                **config,
            ),
            callbacks=[steps],
        )
        trainer.train()
    versions = {module.__name__: module.__version__ for module in (trl, torch, transformers)}
    args.out.write_text(json.dumps({"versions": versions, "steps": steps.rows}) + "\n")


if __name__ == "__main__":
    main()

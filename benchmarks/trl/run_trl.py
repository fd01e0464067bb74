"""The peer of `benchmarks/cpu_grpo.py`: TRL's `GRPOTrainer` on a CPU, in an environment of its own (requirements.txt).

    python run_trl.py --model DIR --data train.jsonl --steps 12 --max-new-tokens 64 --num-threads 4 --out FILE

Prints nothing of use; FILE gets one JSON object with a row per step. `CONFIG` holds every setting that acts, and why.
Nothing of instep is imported here.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras import profiling

PROMPTS, SAMPLES = 32, 8  # a step: the quickstart's
CONFIG: dict[str, Any] = dict(
    # The work: the same as instep's (examples/quickstart/run.py).
    num_generations=SAMPLES,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    num_iterations=1,  # one optimizer step a rollout
    loss_type="grpo",  # the mean over samples of the mean over tokens
    scale_rewards="group",
    beta=0.0,  # no reference model
    epsilon=0.2,
    learning_rate=5e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    weight_decay=0.0,
    adam_beta1=0.9,
    adam_beta2=0.98,
    max_grad_norm=1.0,
    shuffle_dataset=False,  # so that step k has the same prompts on both sides
    # How it is done.
    use_cpu=True,
    bf16=False,  # float32, as instep
    gradient_checkpointing=False,  # the default, True, computes each forward pass twice to save memory
    optim="adamw_torch_fused",  # the default; as instep
    use_vllm=False,  # transformers generates, all samples of a step in one batch
    cache_implementation=None,  # the default: a dynamic KV cache
    dataloader_pin_memory=False,  # there is no device to copy to
    dataloader_num_workers=0,  # 256 rows a step: a worker process would only take a core away
    # Nothing else that costs time.
    logging_strategy="no",
    save_strategy="no",
    eval_strategy="no",
    report_to="none",
    disable_tqdm=True,
    log_completions=False,
)


class Steps(TrainerCallback):
    """Wall-clock seconds of each step, and TRL's own profile of where they went."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.profile: dict[str, float] = defaultdict(float)
        self.trainer: GRPOTrainer | None = None
        steps = self

        def keep(context: profiling.ProfilingContext, duration: float) -> None:
            steps.profile[context.name.partition(".")[2]] += duration

        profiling.ProfilingContext._log_metrics = keep  # TRL would send them to W&B

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        assert self.trainer is not None
        metrics = self.trainer._metrics["train"]
        length = metrics["completions/mean_length"][-1]
        self.rows.append(
            {
                "seconds": now - self.mark,
                "num_response_tokens": round(length * PROMPTS * SAMPLES),
                "longest_response": metrics["completions/max_length"][-1],
                "reward": metrics["reward"][-1],
                **self._parts(now - self.mark, metrics["step_time"][-1]),
            }
        )
        self.profile.clear()
        self.mark = now

    def _parts(self, step: float, training_step: float) -> dict[str, float]:
        """Disjoint parts of a step, from nested ones."""
        p = self.profile
        rewards = p["_calculate_rewards"]
        return {
            "generation": p["transformers.generate"],
            "rewards": rewards,
            "batch": p["_prepare_inputs"] - p["transformers.generate"] - rewards,
            "forward": p["compute_loss"],
            "backward": training_step - p["_prepare_inputs"] - p["compute_loss"],
            "optimizer and other": step - training_step,
        }


def math_reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """1 where the last boxed answer is the label, as instep's `--rm-type math` has it for these one-digit answers."""
    found = [re.findall(r"\\boxed\{([^{}]*)\}", c[0]["content"]) for c in completions]
    return [float(bool(boxed) and boxed[-1].strip() == wanted) for boxed, wanted in zip(found, label, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--fixed", action="store_true", help="EOS ends nothing: all responses have that length")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=128, help="samples of a forward pass (32 to 256 tried)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="another value in CONFIG")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    config = CONFIG | {k: json.loads(v) for k, _, v in (s.partition("=") for s in args.set)}
    if args.fixed:
        config["generation_kwargs"] = {"min_new_tokens": args.max_new_tokens}
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=math_reward,
            train_dataset=Dataset.from_list([{"prompt": r["prompt"], "label": r["label"]} for r in rows]),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=args.steps,
                max_completion_length=args.max_new_tokens,
                per_device_train_batch_size=args.micro_batch,
                gradient_accumulation_steps=PROMPTS * SAMPLES // args.micro_batch,
                seed=args.seed,
                **config,
            ),
            callbacks=[steps],
        )
        steps.trainer = trainer
        trainer.train()
    versions = {m.__name__: m.__version__ for m in (trl, torch, transformers)}
    args.out.write_text(json.dumps({"versions": versions, "steps": steps.rows}) + "\n")


if __name__ == "__main__":
    main()

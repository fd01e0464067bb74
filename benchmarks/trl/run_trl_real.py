"""The peer of `benchmarks/real_task.py`: TRL's `GRPOTrainer` with vLLM colocated. Nothing of instep is used.

    python run_trl_real.py --model DIR --data train.jsonl --steps 40 --out FILE

Sleep mode off, fp32 weights under bf16 autocast (TRL's default), no checkpointing, 128 samples a pass, one optimizer
step of 1,024 samples. FILE gets a row for each step.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

REWARDS: list[float] = []


class Steps(TrainerCallback):
    def __init__(self, out: Path) -> None:
        self.rows, self.out = list[dict[str, float]](), out

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.rows.append({"seconds": time.perf_counter() - self.began, "reward": REWARDS[-1], "time": time.time()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        name = "sampling/sampling_logp_difference/mean"
        if self.rows and logs and name in logs:
            self.rows[-1]["gap"] = float(logs[name])
        self.out.write_text(json.dumps(self.rows))


def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
    found = [re.match(r"\s*(-?\d+)", text) for text in completions]
    out = [float(bool(m) and m[1] == right) for m, right in zip(found, label, strict=True)]  # type: ignore[index]
    REWARDS.append(sum(out) / len(out))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:  # it adds the <bos> that our prompts begin with
        rows = [{**row, "prompt": row["prompt"].removeprefix("<bos>")} for row in rows]
    config = GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=1024,
        bf16=True,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=8,
        num_generations=16,
        max_completion_length=16,
        temperature=1.0,
        learning_rate=2e-6,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        logging_steps=1,
        report_to="none",
        beta=0.0,
        save_strategy="no",
        generation_kwargs={"stop": ["\n"]},
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    GRPOTrainer(
        model=options.model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Steps(options.out)],
    ).train()


if __name__ == "__main__":
    main()

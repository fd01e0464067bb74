"""The peer of `benchmarks/gpu_grpo.py`: TRL's `GRPOTrainer` with vLLM colocated on one GPU. Nothing of instep is used.

    python run_trl_gpu.py --model DIR --data train.jsonl --steps 4 --new-tokens 512 --out FILE
        [--per-device-batch 16] [--no-checkpointing]

As measured for the comparison: sleep mode off, bf16 weights, no reference model, `ignore_eos`, one optimizer step of
256 samples. FILE gets one JSON object with a row for each step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES = 256


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
        self.rows.append({"seconds": time.perf_counter() - self.began, "peak_gib": round(peak, 1)})
        print(self.rows[-1], flush=True)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, c[:64])) % 97 / 97 for c in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--per-device-batch", type=int, default=16)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--vllm-fraction", type=float, default=0.35)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    steps = Steps()
    config = GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.vllm_fraction,
        vllm_max_model_length=128 + options.new_tokens + 64,
        vllm_enable_sleep_mode=False,
        per_device_train_batch_size=options.per_device_batch,
        gradient_accumulation_steps=SAMPLES // options.per_device_batch,
        gradient_checkpointing=not options.no_checkpointing,
        num_generations=8,
        max_completion_length=options.new_tokens,
        generation_kwargs={"ignore_eos": True},
        temperature=1.0,
        beta=0.0,
        bf16=True,
        learning_rate=1e-6,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.bfloat16},
    )
    trainer = GRPOTrainer(
        model=options.model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[steps],
    )
    trainer.train()
    options.out.write_text(json.dumps({"versions": {"trl": trl.__version__}, "steps": steps.rows}))


if __name__ == "__main__":
    main()

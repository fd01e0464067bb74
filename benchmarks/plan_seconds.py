"""What `instep plan` predicts of the steps in `results/`, beside what was seen: python benchmarks/plan_seconds.py"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.random_model import dimensions  # noqa: E402
from instep.arguments.parse import parse  # noqa: E402
from instep.preflight.plan.card import Card, read  # noqa: E402
from instep.preflight.plan.seconds import predict  # noqa: E402

# Measured: products and copies. The rate of compiled layers that are trained is fitted: `train_step.py` alone shows
# 298e12, whole steps of `gpu_grpo.py`, whose training has the round's own work in it, less.
H100 = Card("NVIDIA H100 80GB HBM3", 798e12, 3.0e12, 50e9, 50e9, 4e-6, {1024: 250e12}, {1024: 230e12})
H200 = read(ROOT / "benchmarks" / "results" / "card-nvidia-h200.json")  # by `instep plan --card-profile measure`
FLAGS = "--colocate --actor-num-gpus-per-node 1 --rollout-backend vllm --precision bf16 --use-dynamic-batch-size"
GIB = {H100.device: 79.2, H200.device: 139.8}
# The newest file of each workload; those of an H100 are of older code, which kept 2 GiB of logits.
STEPS = [f"gpu-grpo-h100{which}" for which in ("", "-10-steps", "-tuned", "-mixed")]
STEPS += [f"gpu-grpo-h200-{which}" for which in ("megatron", "long", "tuned")]
PHASES = {"generate": "rollout", "train": "train", "sync": "sync"}  # those of the plan, and their metrics


@dataclass(frozen=True)
class Row:
    """Seconds by phase.

    Attributes:
        name: the file of `results/`, and what ran.
    """

    name: str
    planned: dict[str, float]
    seen: dict[str, float]


def rows() -> Iterator[Row]:
    """On an H100 of 0.6 B parameters, as wide as the layers whose rate is known."""
    for name in STEPS:
        found = result(name)
        for row in found["rows"]:
            if parts := row.get("parts"):
                seen = {phase: parts[f"perf/{metric}_seconds"] for phase, metric in PHASES.items()}
                yield Row(f"{name}: {row['name']}", _step(found, row), seen)
    found = result("train-step-h100")
    for row in found["rows"]:
        planned = _train_step(found["workload"], row["case"])
        yield Row(f"train-step-h100: {row['case']}", planned, {"train": median(row["seconds"][1:])})


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def _step(found: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    workload = found["workload"]
    prompt, mean = workload["prompt"], None
    if workload.get("lengths") == "mixed":
        parts = row["parts"]
        tokens = [parts[f"perf/{of}_tokens_per_second"] * parts[f"perf/{of}_seconds"] for of in ("rollout", "train")]
        mean, whole = (number / workload["samples"] for number in tokens)
        prompt = round(whole - mean)
    flags = f"--rollout-batch-size {workload['samples'] // 8} --n-samples-per-prompt 8 --max-tokens-per-gpu 32768 "
    flags += f"--rollout-max-prompt-len {prompt} --rollout-max-response-len {workload['new_tokens']} "
    flags += f"--train-backend {row['name'].removeprefix('instep-').removesuffix('-turns').partition(',')[0]}"
    flags += (
        " --offload"
        if any(part.startswith("turns/") for part in row["parts"])
        else " --no-offload-train --no-offload-rollout"
    )
    return _predicted(flags, workload["size"], H200 if found["device"] == H200.device else H100, mean)


def _train_step(workload: dict[str, Any], backend: str) -> dict[str, float]:
    """Whose samples begin with nothing alike."""
    flags = f"--rollout-batch-size {workload['num_samples']} --n-samples-per-prompt 1 --train-backend {backend} "
    flags += f"--max-tokens-per-gpu {workload['max_tokens_per_gpu']} "
    flags += f"--rollout-max-prompt-len {workload['prompt']} --rollout-max-response-len {workload['response']}"
    return {"train": _predicted(flags, "0.6b", H100)["train"]}


def _predicted(flags: str, size: str, card: Card, mean: float | None = None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "qwen3", "max_position_embeddings": 4096, **dimensions(size)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        words = f"{FLAGS} {flags} --hf-checkpoint {folder} --gpu-memory-gb {GIB[card.device]}"
        return predict(parse(words.split(), "plan"), card, mean)


if __name__ == "__main__":
    for each in rows():
        print(each.name, *(f"{phase} {each.planned[phase]:.2f} {seen:.2f}" for phase, seen in each.seen.items()))

"""Does the quickstart hold its figures? Three seeds of it, and what the same time spent on more SFT would have given.

    python benchmarks/quickstart.py [--backends hf megatron] [--seeds 0 1 2] [--device cpu]

Each row is one whole quickstart in processes of its own (`examples/quickstart/run.py`), and then a control: supervised
fine-tuning goes on from the same checkpoint for as many steps as fit into the seconds that GRPO took, and is evaluated
on the same held-out problems with the same decoding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from instep.observability.versions import versions

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["hf", "megatron"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        for backend in args.backends:
            for seed in args.seeds:
                rows.append(one_run(Path(scratch) / f"{backend}-{seed}", backend, seed, args.device))
                print(json.dumps(rows[-1]), flush=True)
    device = f"{os.cpu_count()} cores" if args.device == "cpu" else torch.cuda.get_device_name()
    result = {
        "benchmark": "quickstart",
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "workload": "examples/quickstart/run.py; 512 held-out problems, temperature 1; control: more SFT, same seconds",
        "rows": rows,
        "headline": {
            "largest_reward_before": max(r["eval_reward_before"] for r in rows),
            "smallest_reward_after": min(r["eval_reward_after"] for r in rows),
            "largest_reward_more_sft": max(r["eval_reward_more_sft"] for r in rows),
            "largest_wall_seconds": max(r["wall_seconds"] for r in rows),
            "largest_peak_pss_gb": max(r["peak_pss_gb"] for r in rows),
        },
    }
    (ROOT / "benchmarks" / "results" / f"quickstart-{args.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    show(rows)


def one_run(out: Path, backend: str, seed: int, device: str) -> dict[str, Any]:
    """Run one quickstart and its control."""
    script = ROOT / "examples" / "quickstart" / "run.py"
    common = ["--backend", backend, "--device", device, "--seed", str(seed)]
    run([sys.executable, str(script), "--out", str(out), *common])
    summary = json.loads((out / "summary.json").read_text())
    steps = [json.loads(line) for line in (out / "sft" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "train/loss" in row]
    seconds_per_round = sum(r["perf/step_seconds"] for r in steps[1:]) / len(steps[1:])
    num_rounds = max(1, math.ceil(summary["grpo_seconds"] / seconds_per_round))
    control = evaluate_more_sft(out, backend, device, seed, num_rounds)
    return {
        "backend": backend,
        "seed": seed,
        "eval_reward_before": summary["eval_reward_before"],
        "eval_reward_after": summary["eval_reward_after"],
        "eval_reward_more_sft": control,
        "grpo_seconds": round(summary["grpo_seconds"], 1),
        "more_sft_steps": num_rounds * 40,
        "wall_seconds": round(summary["wall_seconds"], 1),
        "peak_pss_gb": round(summary["peak_pss_bytes"] / 1e9, 2),
        "sync_probe_max_abs_diff": summary["sync_probe_max_abs_diff"],
    }


def evaluate_more_sft(out: Path, backend: str, device: str, seed: int, num_rounds: int) -> float:
    """Return the held-out reward after `num_rounds` more rounds of SFT (40 steps of 32 demonstrations each)."""
    task, hf = out / "task", out / "more-sft-hf"
    common = ["--train-backend", backend, "--device", device, "--seed", str(seed), "--actor-num-gpus-per-node", "1"]
    common += ["--rollout-seed", str(seed + 100), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    sft = ["sft", "--hf-checkpoint", out / "sft" / "hf", "--prompt-data", task / "sft.jsonl", "--input-key", "messages"]
    sft += "--rollout-batch-size 1280 --global-batch-size 32 --rollout-shuffle --calculate-per-token-loss".split()
    sft += "--lr 5e-4 --lr-decay-style constant --lr-warmup-iters 3 --weight-decay 0 --adam-beta2 0.98".split()
    sft += ["--num-rollout", num_rounds, "--run-dir", out / "more-sft", "--save-hf", hf, *common]
    run([sys.executable, "-m", "instep.cli", *map(str, sft)])
    evaluation = ["train", "--hf-checkpoint", hf, "--prompt-data", task / "train.jsonl", "--input-key", "prompt"]
    evaluation += ["--label-key", "label", "--apply-chat-template", "--rm-type", "math", "--num-rollout", 0]
    evaluation += ["--eval-prompt-data", "held-out", task / "eval.jsonl", "--eval-interval", 1]
    evaluation += "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 64".split()
    evaluation += ["--rollout-backend", "embedded", "--run-dir", out / "more-sft-eval", *common]
    run([sys.executable, "-m", "instep.cli", *map(str, evaluation)])
    return json.loads((out / "more-sft-eval" / "summary.json").read_text())["eval_reward_after"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="quickstart: held-out reward")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()

"""GRPO of a real pretrained model on sums, by every way of the weights, beside TRL's `GRPOTrainer`.

    python benchmarks/real_task.py --model DIR [--only NAME ...] [--rollouts 40] [--out FILE] [--add]

DIR is what `examples/real/make_model.py` makes. Each rollout has 64 prompts x 16 samples of at most 16 tokens, one
optimizer step, lr 2e-6 (2e-5 with adapters), bf16; all else are the defaults. The runs follow each other.
A row of the result has the rewards of some rollouts, the seconds of a step by the clock, the mean gap of log-probs,
and of the proofs of all syncs the largest difference over what rounding explains (3 is allowed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from instep.observability.versions import versions  # noqa: E402
from instep.system.gpus import visible_gpus  # noqa: E402

SHOTS = "<bos>Q: 12 + 7\nA: 19\n\nQ: 45 - 18\nA: 27\n\nQ: 3 + 20 + 6\nA: 29\n\nQ: 4 * 12\nA: 48\n\nQ: "
ENDS = "107 108"  # the tokens of one and of two ends of a line
COMMON = (
    "--input-key prompt --label-key label --rollout-batch-size 64 --n-samples-per-prompt 16 --rollout-backend vllm "
    f"--rollout-max-response-len 16 --rollout-stop-token-ids {ENDS} --vllm-max-model-len 1024 --train-backend hf "
    "--custom-rm-path benchmarks.real_task.reward"
)
ON_ONE = "--colocate --actor-num-gpus-per-node 1"
AWAKE = "--no-offload-train --no-offload-rollout"
RUNS = {
    "ipc": f"train {ON_ONE} --lr 2e-6",
    "single-copy": f"train {ON_ONE} --lr 2e-6 --weight-sync single-copy",
    "lora": f"train {ON_ONE} --lr 2e-5 --lora-rank 16 --weight-sync lora",
    "async": f"train-async {ON_ONE} {AWAKE} --vllm-gpu-memory-utilization 0.4 --lr 2e-6 --max-staleness 2 --use-tis",
    "trl": "",
    "ipc-awake": f"train {ON_ONE} {AWAKE} --vllm-gpu-memory-utilization 0.4 --lr 2e-6",
    "shm": f"train {ON_ONE} {AWAKE} --vllm-gpu-memory-utilization 0.4 --lr 2e-6 --weight-sync shm",
    "disk": f"train {ON_ONE} {AWAKE} --vllm-gpu-memory-utilization 0.4 --lr 2e-6 --weight-sync disk",
    "restart": f"train {ON_ONE} {AWAKE} --vllm-gpu-memory-utilization 0.4 --lr 2e-6 --weight-sync restart",
    "ipc-fp32": f"train {ON_ONE} --lr 2e-6 --precision fp32",
    "nccl": "train --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 2e-6 --weight-sync nccl",
    "nccl-async": "train-async --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 2e-6 --weight-sync nccl "
    "--max-staleness 2 --use-tis",
}
SHOWN = (0, 9, 19, 29, 39)  # rollouts whose rewards are in the table


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """1 for the right number (for --custom-rm-path)."""
    found = re.match(r"\s*(-?\d+)", sample.response)
    return float(bool(found) and found[1] == sample.label)  # type: ignore[index]


def question(rng: random.Random) -> tuple[str, int]:
    kind = rng.random()
    if kind < 0.4:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        return f"{a} + {b}", a + b
    if kind < 0.7:
        b, a = sorted((rng.randint(10, 99), rng.randint(10, 99)))
        return f"{a} - {b}", a - b
    if kind < 0.9:
        a, b, c = (rng.randint(2, 40) for _ in range(3))
        return f"{a} + {b} + {c}", a + b + c
    a, b = rng.randint(2, 9), rng.randint(11, 30)
    return f"{a} * {b}", a * b


def write_task(path: Path, num: int = 8000) -> None:
    """Sums, differences and products behind four examples; the base model answers under 1 % at temperature 1."""
    rng, seen = random.Random(0), set[str]()
    with path.open("w") as file:
        while len(seen) < num:
            text, right = question(rng)
            if text not in seen:
                seen.add(text)
                file.write(json.dumps({"prompt": f"{SHOTS}{text}\nA:", "label": str(right)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=["ipc", "single-copy", "lora", "async", "trl"])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--limit", type=float, default=240, help="seconds for each run")
    parser.add_argument("--more", default="", help="further flags of instep")
    parser.add_argument("--logs", type=Path, help="a folder for logs and metrics; default: removed at the end")
    parser.add_argument("--add", action="store_true", help="to the rows that --out has")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        folder = (options.logs or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_task(folder / "train.jsonl")
        rows = json.loads(options.out.read_text())["rows"] if options.add and options.out.exists() else []
        rows = [row for row in rows if row["name"] not in options.only]
        gpus = [gpu.name for gpu in visible_gpus()]
        for name in options.only:
            rows.append({"name": name, **measure(options, name, folder)})
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                options.out.write_text(
                    json.dumps({"gpus": gpus, "versions": versions(), "rows": rows}, indent=1) + "\n"
                )


def measure(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Run one; returns its row, or its error."""
    out, log, began = folder / name, folder / f"{name}.log", time.time()
    data = f"{folder}/train.jsonl"
    if name == "trl":
        words = f"{ROOT}/benchmarks/trl/run_trl_real.py --model {options.model} --data {data} "
        words += f"--steps {options.rollouts} --out {out}.json"
    else:
        words = f"-m instep.cli {RUNS[name]} {COMMON} --hf-checkpoint {options.model} --prompt-data {data} "
        words += f"--num-rollout {options.rollouts} --run-dir {out} {options.more}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *words.split()], stdout=file, stderr=subprocess.STDOUT, env=env)
        try:
            code: int | str = process.wait(timeout=options.limit)
        except subprocess.TimeoutExpired:
            code = f"ended after {options.limit:.0f} s"
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        finally:
            process.kill()
    row: dict[str, Any] = {"whole_s": round(time.time() - began, 1)}
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        row |= {"error": [line for line in lines if "Error" in line][:1] or [str(code)], "log": lines[-3:]}
    if name == "trl":
        found = json.loads(Path(f"{out}.json").read_text()) if Path(f"{out}.json").exists() else []
        return row | of_steps(
            [r["reward"] for r in found], [r["seconds"] for r in found], [r.get("gap") for r in found]
        )
    metrics = out / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return row | of_instep([step for step in steps if "train/loss" in step], began)


def of_steps(rewards: list[float], seconds: list[float], gaps: list[Any]) -> dict[str, Any]:
    known = [gap for gap in gaps if gap is not None]
    return {
        "rollouts": len(rewards),
        "reward": {str(i + 1): round(rewards[i], 4) for i in SHOWN if i < len(rewards)},
        "reward_last_5": round(fmean(rewards[-5:]), 4) if rewards else None,
        "step_s": round(median(seconds[1:]), 3) if len(seconds) > 1 else None,
        "gap_mean": round(fmean(known), 5) if known else None,
        "gap_steps": len(known),
    }


def of_instep(steps: list[dict[str, float]], began: float) -> dict[str, Any]:
    times = [began] + [step["time"] for step in steps]
    seconds = [b - a for a, b in zip(times, times[1:], strict=False)]
    gaps = [step.get("train/log_prob_gap_mean") for step in steps]
    out = of_steps([step["rollout/reward_mean"] for step in steps], seconds, gaps)
    proofs = [step for step in steps if step.get("sync/probe_rounding")]
    if not proofs:
        return out
    ratios = [step["sync/probe_rms_diff"] / step["sync/probe_rounding"] for step in proofs]
    return out | {
        "first_step_s": round(seconds[0], 1),
        "syncs": len(proofs),
        "probe_over_rounding": {"median": round(median(ratios), 3), "largest": round(max(ratios), 3)},
        "probe_rounding": round(median(step["sync/probe_rounding"] for step in proofs), 7),
        "probe_mean_nats": round(median(step["sync/probe_mean_abs_diff"] for step in proofs), 7),
        "probe_largest_nats": round(max(step["sync/probe_max_abs_diff"] for step in proofs), 5),
        "allowed_over_rounding": round(
            max(step["sync/probe_tolerance"] / step["sync/probe_rounding"] for step in proofs), 2
        ),
        "sync_s": round(median(step["sync/session_seconds"] + step["sync/proof_seconds"] for step in proofs), 3),
        "proof_s": round(median(step["sync/proof_seconds"] for step in proofs), 3),
    }


if __name__ == "__main__":
    main()

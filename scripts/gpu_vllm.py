"""Checks stock vLLM on a GPU host: the conformance suite, runs in both precisions, serving, pauses, a killed engine.

    python scripts/gpu_vllm.py --out DIR [--only NAME ...]

All jobs run at once, as the models are tiny: each engine takes a bounded part of the one GPU. The last job runs alone,
with the defaults of a user who gives no limits. With two GPUs, one more has an engine that spans both, and with NIXL
two more have an engine for prefill and one for decode. Logs and results are in DIR; the table at the end says what
passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
# Nothing sleeps: vLLM measures what it frees, and the other jobs use the card at the same time.
BOUNDED = "--vllm-gpu-memory-utilization 0.1 --vllm-kv-cache-memory-bytes 1073741824 "
BOUNDED += "--no-offload-train --no-offload-rollout"
REWARD = 0.9  # that the quickstart must reach, held out
GAP_RATIO = 1.2
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
SUITES = ("conformance", "conformance_control", "conformance_routes", "weights", "teacher")
CONFORMANCE = [f"tests/engines/test_{name}.py" for name in SUITES]


def quickstart(out: Path, precision: str) -> list[str]:
    command = [sys.executable, "examples/quickstart/run.py", "--device", "cuda", "--precision", precision]
    return [*command, "--rollout-backend", "vllm", "--out", str(out), "--grpo-flags", BOUNDED]


def jobs(out: Path) -> dict[str, list[str]]:
    gap = [sys.executable, "benchmarks/bf16_gap.py", "--device", "cuda", "--quickstart", str(out / "bf16")]
    two = {}
    if torch.cuda.device_count() > 1:
        two["tensor"] = train(out, "tensor", f"--actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 {BOUNDED}")
    if torch.cuda.device_count() > 1 and importlib.util.find_spec("nixl") is not None:
        two["apart"] = train(out, "apart", f"--actor-num-gpus-per-node 2 --prefill-num-servers 1 {BOUNDED}")
        two["prefill"] = [*PYTEST, "tests/e2e/test_prefill_decode.py"]
    first = {
        "fp32": quickstart(out / "fp32", "fp32"),
        "bf16": quickstart(out / "bf16", "bf16"),
        "tied": [*PYTEST, *CONFORMANCE, "-k", "vllm-tied"],
        "untied": [*PYTEST, *CONFORMANCE, "-k", "vllm-untied"],
        "gap": [*gap, "--run-dir", str(out / "gap"), "--out", str(out / "gap.json")],
        "serve": [*PYTEST, "tests/e2e/test_serve.py", "-k", "vllm"],
        "modes": [*PYTEST, "tests/e2e/test_pause_modes.py", "-k", "vllm"],
        "killed": [*PYTEST, "tests/e2e/test_engines.py", "-k", "somebody_else"],
    }
    return first | two


def train(out: Path, name: str, more: str) -> list[str]:
    """The command of a few GRPO steps from the end of job bf16's SFT, with trainer and engines on the same GPUs."""
    words = f"train --hf-checkpoint {out}/bf16/sft/hf --prompt-data {out}/bf16/task/train.jsonl --input-key prompt "
    words += "--label-key label --apply-chat-template --rm-type math --colocate "
    words += "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 4 --rollout-max-response-len 64 --lr 5e-4 "
    words += f"--use-dynamic-batch-size --max-tokens-per-gpu 8192 --run-dir {out}/{name} {more}"
    return [sys.executable, "-m", "instep.cli", *words.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="these jobs; `auto` is the last one")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.limit
    wanted = args.only or [*jobs(out), "auto"]
    ended = run_all({n: c for n, c in jobs(out).items() if n in wanted}, out, deadline)
    if "auto" in wanted:
        defaults = "--actor-num-gpus-per-node 1"  # --rollout-backend auto, no word of memory or precision
        ended |= run_all({"auto": train(out, "auto", defaults)}, out, deadline)
    rows = [(name, *judge(name, out, code), seconds) for name, (code, seconds) in ended.items()]
    for name, passed, figures, seconds in rows:
        print(f"{'pass' if passed else 'FAIL'}  {name:8} {seconds:4.0f} s  {figures}")
    return 0 if all(passed for _, passed, *_ in rows) else 1


def run_all(commands: dict[str, list[str]], out: Path, deadline: float) -> dict[str, tuple[int, float]]:
    """Run the commands; returns exit code and seconds of each. At the deadline, those that still run are ended."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    after_sft = ("gap", "tensor", "apart")
    began, running, ended = time.monotonic(), dict[str, subprocess.Popen[bytes]](), dict[str, tuple[int, float]]()
    waiting, sft = dict(commands), out / "bf16" / "sft" / "summary.json"
    if "bf16" in commands:
        sft.unlink(missing_ok=True)  # of an earlier run
    try:
        while waiting or running:
            for name in list(waiting):
                after = running.get("bf16") if name in after_sft else None  # whose SFT it goes on from
                if after is None or sft.exists():
                    with open(out / f"{name}.log", "wb") as log:
                        more: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                        running[name] = subprocess.Popen(waiting.pop(name), cwd=ROOT, env=env, **more)
            time.sleep(0.2)
            if time.monotonic() > deadline:
                end(list(running.values()))
            for name, process in list(running.items()):
                if process.poll() is not None:
                    ended[name] = (process.wait(), time.monotonic() - began)
                    del running[name]
                    print(f"{time.monotonic() - began:4.0f} s: {name} ended with {ended[name][0]}", flush=True)
    finally:
        end(list(running.values()))
    return ended


def end(jobs: list[subprocess.Popen[bytes]]) -> None:
    """End jobs and their children: `instep` ends its own at SIGTERM; what is left of a job's group gets SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left, deadline = [job for job in jobs if signalled(job, number)], time.monotonic() + GRACE
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = [job for job in left if job.poll() is None or signalled(job, 0)]


def signalled(job: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the job's process group. Returns whether it still has a process."""
    try:
        os.killpg(job.pid, number)
    except ProcessLookupError:
        return False
    return True


def judge(name: str, out: Path, code: int) -> tuple[bool, str]:
    """Whether a job has passed, and its figures or the last line of its log."""
    read: dict[str, Callable[[], tuple[bool, str]]] = {
        "fp32": lambda: trained(out / "fp32", REWARD),
        "bf16": lambda: trained(out / "bf16", REWARD),
        "auto": lambda: trained(out / "auto", None),
        "tensor": lambda: trained(out / "tensor", None),
        "apart": lambda: trained(out / "apart", None),
        "gap": lambda: gap(json.loads((out / "gap.json").read_text())["headline"]),
    }
    log = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()
    if code == 0 and name in read:
        return read[name]()
    return code == 0, log[-1] if log else ""


def trained(run_dir: Path, reward: float | None) -> tuple[bool, str]:
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in steps if "train/loss" in row][-1]
    figures = f"log-prob gap mean {last['train/log_prob_gap_mean']:.2e} max {last['train/log_prob_gap_max']:.2e}, "
    figures += f"{last['sync/version']} syncs, probe {summary['sync_probe_max_abs_diff']:.2e} "
    figures += f"(tolerance {summary['sync_probe_tolerance']:.2e})"
    if reward is None:
        return True, figures
    before, after = summary["eval_reward_before"], summary["eval_reward_after"]
    return after >= reward, f"held-out reward {before:.3f} -> {after:.3f}, {figures}"


def gap(found: dict[str, Any]) -> tuple[bool, str]:
    figures = f"mean gap {found['gap_mean_after_syncs']:.3e} after {found['num_syncs']} syncs, "
    figures += f"{found['gap_mean_loaded_from_disk']:.3e} loaded from disk: ratio {found['gap_ratio']:.4f}, "
    figures += f"{found['num_tokens']} tokens, the two engines differ by {found['engines_max_abs_diff']:.1e}"
    return found["gap_ratio"] <= GAP_RATIO, figures


if __name__ == "__main__":
    sys.exit(main())

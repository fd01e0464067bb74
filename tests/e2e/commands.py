"""Running `instep` as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from instep_engine.place import SYNC
from tests import forks
from tests.bounds import allowed

ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def grpo_arguments(tiny: Path, run_dir: Path, *more: str) -> list[str]:
    """A small GRPO run: 2 rollouts of 4 prompts x 4 samples. Later flags win over earlier ones."""
    defaults = {
        "--hf-checkpoint": tiny / "hf",
        "--prompt-data": tiny / "train.jsonl",
        "--input-key": "prompt",
        "--label-key": "label",
        "--rm-type": "math",
        "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 4,
        "--rollout-max-response-len": 16,
        "--num-rollout": 2,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
        "--train-backend": "hf",
        "--actor-num-gpus-per-node": 1,
        "--num-threads": 1,
        "--device": "cpu",
        "--run-dir": run_dir,
    }
    given = {flag for flag in more if flag.startswith("--")}
    out = [str(x) for flag, value in defaults.items() if flag not in given for x in (flag, value)]
    return ["train", *out, "--apply-chat-template", *more]


def sft_arguments(tiny: Path, run_dir: Path, *more: str) -> list[str]:
    """A small SFT run on the `hf` backend, which saves and exports into `run_dir`."""
    out = ["sft", "--hf-checkpoint", str(tiny / "hf"), "--prompt-data", str(tiny / "sft.jsonl"), "--input-key"]
    out += ["messages", "--rollout-batch-size", "4", "--lr", "1e-3", "--train-backend", "hf", "--num-threads", "1"]
    out += ["--actor-num-gpus-per-node", "1", "--device", "cpu", "--run-dir", str(run_dir)]
    return [*out, "--save", str(run_dir / "ckpt"), "--save-hf", str(run_dir / "hf"), *more]


def on_vllm(num_engines: int = 1, trainer: bool = True) -> list[str]:
    """vLLM engines in float32: on the CPU, or, where there are GPUs, each on one that it shares with the trainer."""
    import torch

    flags = ["--rollout-backend", "vllm", "--vllm-kv-cache-memory-bytes", str(128 << 20)]
    if torch.cuda.is_available():
        flags += ["--vllm-gpu-memory-utilization", "0.1", "--device", "cuda", "--precision", "fp32"]
    if not torch.cuda.is_available() or not trainer:
        return [*flags, "--rollout-num-gpus", str(num_engines)]
    # Engines that sleep measure what they free, and other tests use the card at the same time.
    flags += ["--no-offload-train", "--no-offload-rollout"]
    return [*flags, "--colocate", "--actor-num-gpus-per-node", str(num_engines)]


def on_sglang(num_engines: int = 1) -> list[str]:
    """SGLang engines in float32 on the CPU."""
    flags = ["--rollout-backend", "sglang", "--rollout-num-gpus", str(num_engines)]
    return [*flags, "--sglang-max-total-tokens", "8192", "--sglang-max-running-requests", "64"]


def sync_folder(args: Any) -> Path:
    """The folder through which the weights of a run travel that has no `Deployment`."""
    folder = Path(args.run_dir) / f"{SYNC}1"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.absolute()


def start(arguments: list[str], **kwargs) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "instep.cli", *arguments]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def run(arguments: list[str], timeout: float = 360) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instep.cli", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=allowed(timeout))


def children(pid: int) -> list[psutil.Process]:
    """All that it has started, and these; without the fork servers of the tests."""
    servers = {server.pid for server in forks.SERVERS}
    return [p for p in psutil.Process(pid).children(recursive=True) if p.pid not in servers]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none if it has just ended."""
    try:
        return " ".join(process.cmdline()).split()  # the title of a forked process is one text
    except psutil.NoSuchProcess:  # or one that waits to be reaped
        return []


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or waits to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all have ended (or wait to be reaped) within the seconds that are allowed."""
    _, alive = psutil.wait_procs(processes, timeout=allowed(seconds))
    return all(map(has_ended, alive))

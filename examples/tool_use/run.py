"""Tool use: make a tiny model and a task, teach it by demonstrations, then let it practise (GRPO) with a tool.

As in the quickstart, three commands in a row, each one that a user could type. What is new is one flag,
`--custom-generate-function-path python_tool.generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SFT = "--rollout-batch-size 1280 --global-batch-size 32 --rollout-shuffle --calculate-per-token-loss --lr 3e-3"
SFT += " --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05"
GRPO = "--n-samples-per-prompt 8 --rollout-shuffle --rollout-max-response-len 96 --eval-interval 100 --lr 5e-4"
GRPO += " --lr-decay-style constant --lr-warmup-iters 3"
COMMON = "--use-dynamic-batch-size --max-tokens-per-gpu 8192 --weight-decay 0 --adam-beta2 0.98"
console = Console(highlight=False)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tool-use"), help="everything is written below it")
    parser.add_argument("--backend", choices=("hf", "megatron"), default="hf", help="train backend")
    parser.add_argument("--rollout-backend", choices=("embedded", "vllm"), default="embedded", help="what generates")
    parser.add_argument("--num-engines", type=int, default=1, help="several stand behind vllm-router")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the sampling")
    parser.add_argument("--num-threads", type=int, help="cores to use (default: all)")
    parser.add_argument("--num-sft", type=int, default=10, help="rounds of 1280 demonstrations")
    parser.add_argument("--num-rollout", type=int, default=20, help="steps of GRPO")
    parser.add_argument("--rollout-batch-size", type=int, default=32, help="prompts of a step, with 8 samples each")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out prompts")
    parser.add_argument("--num-terms", type=int, default=3, help="numbers of a problem")
    return parser


def main() -> int:
    args = arguments().parse_args()
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(HERE.absolute()), os.environ.get("PYTHONPATH")]))  # for python_tool
    for title, command in stages(args):
        console.rule(f"[bold]{title}")
        words = ["instep", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
        console.print(shlex.join(words), style="dim")
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode
        if code:
            return code
    summary = json.loads((args.out / "summary.json").read_text())
    table = Table(title="tool use", show_header=False)
    table.add_row("held-out reward before GRPO", f"{summary['eval_reward_before']:.3f}")
    table.add_row("held-out reward after GRPO", f"{summary['eval_reward_after']:.3f}")
    table.add_row("seconds, all three stages", f"{time.monotonic() - started:.0f}")
    console.print(table)
    console.print(f"what it writes: instep samples {args.out}\nmodel:          {args.out / 'hf'}")
    return 0


def stages(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The three commands with their titles."""
    out, task = args.out, args.out / "task"
    instep = [sys.executable, "-m", "instep.cli"]
    common = ["--train-backend", args.backend, "--device", "cpu", "--seed", str(args.seed)]
    common += ["--actor-num-gpus-per-node", "1", "--rollout-seed", str(args.seed)]
    common += COMMON.split()
    if args.num_threads:
        common += ["--num-threads", str(args.num_threads)]
    make = [sys.executable, str(HERE / "make_sums_task.py"), "--out", task, "--seed", args.seed]
    make += ["--num-sft", 1280 * args.num_sft, "--num-eval", args.num_eval, "--num-terms", args.num_terms]
    sft = ["sft", "--hf-checkpoint", task / "hf", "--prompt-data", task / "sft.jsonl", "--input-key", "messages"]
    sft += [*SFT.split(), "--num-rollout", args.num_sft]
    sft += ["--run-dir", out / "sft", "--save-hf", out / "sft" / "hf", *common]
    grpo = ["train", "--hf-checkpoint", out / "sft" / "hf", "--prompt-data", task / "train.jsonl"]
    grpo += ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "math"]
    grpo += ["--custom-generate-function-path", "python_tool.generate"]
    grpo += ["--eval-prompt-data", "held-out", task / "eval.jsonl", *GRPO.split()]
    grpo += ["--num-rollout", args.num_rollout, "--rollout-batch-size", args.rollout_batch_size]
    grpo += ["--rollout-backend", args.rollout_backend, "--rollout-num-gpus", args.num_engines]
    grpo += ["--run-dir", out, "--save-hf", out / "hf", *common]
    return [
        ("1/3  a tiny model and a task", [*map(str, make)]),
        ("2/3  supervised fine-tuning on uneven demonstrations", [*instep, *map(str, sft)]),
        ("3/3  GRPO with a tool", [*instep, *map(str, grpo)]),
    ]


if __name__ == "__main__":
    sys.exit(main())

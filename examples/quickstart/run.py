"""The quickstart: make a tiny model and a task, teach it by demonstrations, then let it practise (GRPO).

Three commands in a row, each one that a user could type; this file only starts them, measures all of them together and
puts one summary at the end. No flag here is special to the task.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instep.observability.memory import PssSampler
from instep.observability.report import make_report
from instep.observability.sinks import write_json

HERE = Path(__file__).parent
console = Console(highlight=False)


def settings(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="everything is written below it")
    parser.add_argument("--backend", choices=("hf", "megatron"), default="hf", help="train backend")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cluster", choices=("local", "ray"), default="local", help="what starts the processes")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on a GPU")
    parser.add_argument(
        "--rollout-backend",
        choices=("auto", "embedded", "vllm", "sglang"),
        default="auto",
        help="what generates; auto: vllm on a GPU host that has it, else the embedded engine",
    )
    parser.add_argument("--num-engines", type=int, default=1, help="several stand behind a router")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the sampling")
    parser.add_argument("--num-threads", type=int, help="cores to use (default: all)")
    parser.add_argument("--grpo-flags", default="", help="more flags for GRPO, such as '--vllm-max-num-seqs 64'")
    args = parser.parse_args(argv)
    if args.device == "cuda" and args.num_engines > 1:
        parser.error("--device cuda: the trainer and one engine share a GPU")
    return args


def main() -> int:
    args, started = settings(), time.monotonic()
    with PssSampler() as memory:
        for title, command in stages(args):
            console.rule(f"[bold]{title}")
            words = ["instep", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
            console.print(shlex.join(words), style="dim")
            code = subprocess.run(command).returncode
            if code:
                return code
    summarise(args.out, time.monotonic() - started, memory.peak)
    return 0


def stages(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The three commands with their titles."""
    out, task = args.out, args.out / "task"
    instep = [sys.executable, "-m", "instep.cli"]
    common = ["--train-backend", args.backend, "--device", args.device, "--seed", str(args.seed)]
    common += ["--cluster", args.cluster, "--precision", args.precision]
    common += ["--actor-num-gpus-per-node", "1", "--rollout-seed", str(args.seed)]
    common += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    common += ADAM
    if args.num_threads:
        common += ["--num-threads", str(args.num_threads)]
    sft = ["sft", "--hf-checkpoint", task / "hf", "--prompt-data", task / "sft.jsonl", "--input-key", "messages"]
    sft += [*SFT, "--run-dir", out / "sft", "--save-hf", out / "sft" / "hf", *common]
    grpo = ["train", "--hf-checkpoint", out / "sft" / "hf", "--prompt-data", task / "train.jsonl"]
    grpo += ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "math"]
    grpo += ["--eval-prompt-data", "held-out", task / "eval.jsonl", *GRPO]
    grpo += ["--rollout-backend", args.rollout_backend, "--use-tensorboard", *shlex.split(args.grpo_flags)]
    grpo += ["--colocate"] if args.device == "cuda" else ["--rollout-num-gpus", args.num_engines]  # one GPU for both
    grpo += ["--run-dir", out, "--save-hf", out / "hf", *common]
    return [
        (
            "1/3  a tiny model and a task",
            [sys.executable, str(HERE / "make_task.py"), "--out", str(task), "--seed", str(args.seed)],
        ),
        ("2/3  supervised fine-tuning on uneven demonstrations", [*instep, *map(str, sft)]),
        ("3/3  GRPO", [*instep, *map(str, grpo)]),
    ]


SFT = "--rollout-batch-size 1280 --global-batch-size 32 --num-rollout 10 --rollout-shuffle".split()
SFT += "--calculate-per-token-loss --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05".split()
GRPO = "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 25 --rollout-shuffle".split()
GRPO += "--rollout-max-response-len 64 --rollout-temperature 1 --eval-interval 100".split()
GRPO += "--lr 5e-4 --lr-decay-style constant --lr-warmup-iters 3".split()
ADAM = "--weight-decay 0 --adam-beta1 0.9 --adam-beta2 0.98 --clip-grad 1".split()


def summarise(out: Path, seconds: float, peak_pss: float) -> None:
    """Write and print the summary of the whole quickstart, which replaces that of its last command."""
    path = out / "summary.json"
    summary = json.loads(path.read_text())
    summary["grpo_seconds"] = summary["wall_seconds"]
    summary["wall_seconds"] = seconds
    summary["peak_pss_bytes"] = max(peak_pss, summary["peak_pss_bytes"])
    write_json(path, summary)
    report = make_report(out)
    table = Table(title="quickstart", show_header=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_row("held-out reward before GRPO", f"{summary['eval_reward_before']:.3f}")
    table.add_row("held-out reward after GRPO", f"{summary['eval_reward_after']:.3f}")
    table.add_row("optimizer steps (GRPO)", str(summary["num_steps"]))
    table.add_row("largest trainer-engine difference at a sync, nats", f"{summary['sync_probe_max_abs_diff']:.1e}")
    table.add_row("seconds, all three stages", f"{seconds:.0f}")
    table.add_row("memory at its peak (PSS, all processes)", f"{summary['peak_pss_bytes'] / 1e9:.2f} GB")
    console.print(table)
    console.print(f"report: {report}\nmodel:  {out / 'hf'}")
    console.print(f"next:   {Path(sys.executable).with_name('instep')} view {out}, then docs/quick_start.md")


if __name__ == "__main__":
    sys.exit(main())

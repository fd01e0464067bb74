"""Does every algorithm learn? The quickstart's task, its GRPO stage with other flags: held-out reward before and after.

    python benchmarks/learning.py [--algorithms NAME ...] [--seeds 0 1 2] [--backend hf] [--jobs 1] [--threads N]

Task, model and supervised warm-up are made once for each seed; then each algorithm starts from that checkpoint, with
four optimizer steps a rollout (three of them off-policy: with one, ratios are 1 and clipping is never seen). Ends with
exit code 1 if a run gains less than 0.2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from instep.observability.versions import versions

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
import run as quickstart  # noqa: E402
from machine import cores  # noqa: E402

GAIN = 0.2
MINUTES = 15  # at most, for one run
OFF_POLICY = "--num-steps-per-rollout 4"
# Its rollouts grow as the task is learnt, until hardly a group is left that is not solved: fewer rollouts.
FILTER = "--dynamic-sampling-filter-path instep.rollout.filters.check_reward_nonzero_std --num-rollout 12"
ALGORITHMS = {
    "grpo": "",
    "grpo, KL in the loss": "--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl",
    "grpo, KL in the reward": "--kl-coef 0.01 --kl-loss-type k1",
    "grpo, dual clip, entropy bonus": "--eps-clip-c 3 --entropy-coef 0.001",
    "grpo, TIS": "--use-tis --tis-clip 2",
    "grpo, sequence TIS, rejection, OPSM": "--use-tis --tis-level sequence --use-rs --rs-level geometric --use-opsm",
    "grpo, IcePop": "--use-tis --tis-mode mask --tis-clip-low 0.5 --tis-clip 5",
    "dapo": f"--eps-clip-high 0.28 --calculate-per-token-loss --overlong-buffer-len 16 {FILTER}",
    "dr_grpo": "--advantage-estimator dr_grpo --calculate-per-token-loss",
    "rloo": "--advantage-estimator rloo",
    "max_rl": "--advantage-estimator max_rl",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --kl-coef 0.001",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.001",
    "gspo": "--advantage-estimator gspo",
    "cispo": "--advantage-estimator cispo",
    "sapo": "--advantage-estimator sapo",
    "dppo_tv": "--advantage-estimator dppo_tv",
    "dppo_kl": "--advantage-estimator dppo_kl",
    "ppo": "--advantage-estimator ppo --critic-lr 2e-3 --num-critic-only-steps 5 --normalize-advantages",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--backend", default="hf", choices=("hf", "megatron"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, help="of each run (default: all cores)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "learning-cpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch, Progress() as progress:
        pool = ThreadPoolExecutor(args.jobs)
        seeds = {seed: Path(scratch) / f"seed-{seed}" for seed in args.seeds}
        bar = progress.add_task("warm-up of each seed", total=len(seeds))
        for _ in pool.map(lambda seed: warm_up(args, seed, seeds[seed]), seeds):
            progress.advance(bar)
        bar = progress.add_task("runs", total=len(seeds) * len(args.algorithms))
        jobs = [(name, seed) for name in args.algorithms for seed in seeds]
        rows = []
        for row in pool.map(lambda job: learn(args, *job, seeds[job[1]]), jobs):
            rows.append(row)
            progress.console.print(json.dumps(row))
            progress.advance(bar)
    result = {
        "benchmark": "learning",
        "device": cores(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "workload": {
            "task": "examples/quickstart/run.py; 512 held-out problems, temperature 1",
            "backend": args.backend,
            "jobs": args.jobs,
            "threads": args.threads,
            "flags": {name: f"{OFF_POLICY} {ALGORITHMS[name]}".strip() for name in args.algorithms},
        },
        "rows": rows,
        "headline": {
            "smallest_gain": min(row["gain"] for row in rows),
            "smallest_reward_after": min(row["reward_after"] for row in rows),
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(rows)
    return int(any(row["gain"] < GAIN for row in rows))


def stages(args: argparse.Namespace, seed: int, out: Path) -> list[list[str]]:
    """Return the quickstart's three commands."""
    words = ["--out", str(out), "--backend", args.backend, "--seed", str(seed), "--num-threads", str(args.threads)]
    return [command for _, command in quickstart.stages(quickstart.settings(words))]


def warm_up(args: argparse.Namespace, seed: int, folder: Path) -> None:
    for command in stages(args, seed, folder)[:2]:
        run(command)


def learn(args: argparse.Namespace, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the algorithm `name` once from the checkpoint in `folder`."""
    out = folder / name.replace(" ", "-").replace(",", "")
    command = stages(args, seed, folder)[2]
    own = f"--run-dir {out} --save-hf {out}/hf {OFF_POLICY} {ALGORITHMS[name]}".split()
    for flag in ("--run-dir", "--save-hf", "--num-rollout"):
        if flag in own:
            del command[command.index(flag) : command.index(flag) + 2]
    begin = time.monotonic()
    run([*command, *own])
    seconds = time.monotonic() - begin
    summary = json.loads((out / "summary.json").read_text())
    before, after = summary["eval_reward_before"], summary["eval_reward_after"]
    return {
        "algorithm": name,
        "seed": seed,
        "reward_before": round(before, 3),
        "reward_after": round(after, 3),
        "gain": round(after - before, 3),
        "num_steps": summary["num_steps"],
        "seconds": round(seconds, 1),
    }


def run(command: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * MINUTES)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="held-out reward, a run per seed")
    for title in ("algorithm", "before", "after", "seconds"):
        table.add_column(title, justify="left" if title == "algorithm" else "right")
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [row for row in rows if row["algorithm"] == name]
        cells = [" ".join(f"{row[key]:.3f}" for row in mine) for key in ("reward_before", "reward_after")]
        table.add_row(name, *cells, " ".join(f"{row['seconds']:.0f}" for row in mine))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

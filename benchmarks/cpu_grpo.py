"""GRPO on a CPU, whole steps: instep against TRL's `GRPOTrainer`, which runs in an environment of its own.

    python benchmarks/cpu_grpo.py [--threads 4] [--steps 21] [--repeats 3] [--quickstart DIR] [--out FILE]

Both train the quickstart's model (after its SFT warm-up) with the quickstart's batch and settings on the same prompts
in the same order, pinned to the same cores, in turn. Measured at natural lengths, and at fixed ones, where every
response has `--max-new-tokens` tokens: instep's engine ignores EOS, TRL never samples it. TRL's settings stand in
`trl/run_trl.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from instep.observability.versions import versions
from instep.rollout.vllm_rollout import generate

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
import run as quickstart  # noqa: E402
from machine import cpu_name  # noqa: E402

NUM_SAMPLES = 256  # of a step: 32 prompts, 8 responses each
LENGTHS, FRAMEWORKS = ("natural", "fixed"), ("instep", "trl")
PHASES = {"generation and rewards": "rollout", "forward, backward, optimizer": "train", "weight sync": "sync"}


async def generate_fixed(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate as instep does (for --custom-generate-function-path), but beyond EOS."""
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4, help="cores, and threads of each process")
    parser.add_argument("--steps", type=int, default=21, help="of each run")
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--trl-env", type=Path, default=ROOT / ".venv" / "trl", help="made if missing")
    parser.add_argument("--quickstart", type=Path, help="folder of a quickstart, for its model and data; default: made")
    parser.add_argument("--lock", type=Path, help="hold this file's lock (flock) through each repeat, 15 minutes' wait")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu-grpo.json")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    if len(cores) < args.threads:
        sys.exit(f"{args.threads} threads want as many cores; {len(cores)} are usable here")
    python = trl_python(args.trl_env)
    runs = []
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as folder:
        scratch = Path(folder)
        if args.quickstart is None:
            args.quickstart = scratch / "quickstart"
            words = ["--out", str(args.quickstart), "--num-threads", str(args.threads)]
            for _, command in quickstart.stages(quickstart.settings(words))[:2]:
                execute(command, cores, scratch)
        args.quickstart = args.quickstart.resolve()
        for repeat in range(args.repeats):
            with exclusive(args.lock):
                for lengths in LENGTHS:
                    for framework in FRAMEWORKS if repeat % 2 == 0 else reversed(FRAMEWORKS):
                        measure = run_instep if framework == "instep" else run_trl
                        steps = measure(args, cores, scratch, lengths == "fixed", python)
                        runs.append({"framework": framework, "lengths": lengths, "repeat": repeat, "steps": steps})
                        print(repeat, lengths, framework, summary(steps[args.skip :]), flush=True)
            trl_versions = json.loads((scratch / "trl.json").read_text())["versions"]
            result = report(args, cores, runs, trl_versions)
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # so that a run that is cut off leaves something
    show(result)


def trl_python(env: Path) -> Path:
    """Return the interpreter of TRL's environment, which is made the first time."""
    python, stamp, pins = env / "bin" / "python", env / "installed.txt", HERE / "trl" / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == pins.read_text()):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(env)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        # torch first, with what its build needs (a CUDA build: libraries without pins); the other pins are complete.
        subprocess.run([*install, "--constraint", str(pins), torch], check=True)
        subprocess.run([*install, "--no-deps", "--requirement", str(pins)], check=True)
        stamp.write_text(pins.read_text())
    return python


@contextlib.contextmanager
def exclusive(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    deadline = time.monotonic() + 900
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    sys.exit(f"{path} was locked for 15 minutes")
                time.sleep(0.01)
        yield


def execute(command: list[str], cores: list[int], scratch: Path) -> None:
    """Run a command on `cores` only, for 10 minutes at most."""
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(cores)), "PYTHONPATH": f"{ROOT}:{HERE}"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    done = subprocess.run(pinned, env=environment, cwd=scratch, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def run_instep(
    args: argparse.Namespace, cores: list[int], scratch: Path, fixed: bool, _: Path
) -> list[dict[str, float]]:
    """Run `instep train` once, and return seconds, tokens and parts of each step."""
    out, source = Path(tempfile.mkdtemp(dir=scratch)), args.quickstart
    command = [sys.executable, "-m", "instep.cli", "train", "--hf-checkpoint", source / "sft" / "hf"]
    command += ["--prompt-data", source / "task" / "train.jsonl", "--input-key", "prompt", "--label-key", "label"]
    command += ["--apply-chat-template", "--rm-type", "math", *grpo_settings(), *quickstart.ADAM]
    command += ["--train-backend", "hf", "--device", "cpu", "--actor-num-gpus-per-node", "1"]
    command += ["--rollout-backend", "embedded", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    command += ["--num-threads", args.threads, "--num-rollout", args.steps, "--run-dir", out]
    command += ["--rollout-max-response-len", args.max_new_tokens]
    if fixed:
        command += ["--custom-generate-function-path", "cpu_grpo.generate_fixed"]
    execute([str(c) for c in command], cores, scratch)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    assert len(rows) == args.steps
    steps = []
    for before, row in zip([None, *rows], rows, strict=False):
        # Rows are stamped as a step ends, so that nothing between two steps is left out (of the first: unknown).
        seconds = row["time"] - before["time"] if before else row["perf/step_seconds"]
        parts = {part: row[f"perf/{name}_seconds"] for part, name in PHASES.items()}
        steps.append(
            {
                "seconds": seconds,
                "num_response_tokens": round(row["rollout/response_length_mean"] * NUM_SAMPLES),
                "longest_response": row["rollout/response_length_max"],
                "reward": row["rollout/reward_mean"],
                **parts,
                "other": seconds - sum(parts.values()),
            }
        )
    return steps


def grpo_settings() -> list[str]:
    """Return the quickstart's flags without its evaluation, and with prompts in the order of the file, as TRL's."""
    settings = list(quickstart.GRPO)
    for name in ("--eval-interval", "--num-rollout", "--rollout-max-response-len"):
        del settings[settings.index(name) : settings.index(name) + 2]
    settings.remove("--rollout-shuffle")
    return settings


def run_trl(
    args: argparse.Namespace, cores: list[int], scratch: Path, fixed: bool, python: Path
) -> list[dict[str, float]]:
    out, source = scratch / "trl.json", args.quickstart
    command = [python, HERE / "trl" / "run_trl.py", "--model", source / "sft" / "hf", "--out", out]
    command += ["--data", source / "task" / "train.jsonl", "--steps", args.steps, "--num-threads", args.threads]
    command += ["--max-new-tokens", args.max_new_tokens, *(["--fixed"] if fixed else [])]
    execute([str(c) for c in command], cores, scratch)
    return json.loads(out.read_text())["steps"]


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of one run, from its measured steps."""
    tokens, seconds = sum(s["num_response_tokens"] for s in steps), sum(s["seconds"] for s in steps)
    counted = ("seconds", "num_response_tokens", "longest_response", "reward")
    return {
        "seconds_per_step": round(median(s["seconds"] for s in steps), 3),
        "response_tokens_per_second": round(tokens / seconds),
        "response_length_mean": round(tokens / len(steps) / NUM_SAMPLES, 2),
        "longest_response": round(median(s["longest_response"] for s in steps)),
        "reward_mean": round(sum(s["reward"] for s in steps) / len(steps), 3),
        "breakdown": {part: round(median(s[part] for s in steps), 3) for part in steps[0] if part not in counted},
    }


def report(
    args: argparse.Namespace, cores: list[int], runs: list[dict[str, Any]], trl_versions: dict[str, str]
) -> dict[str, Any]:
    """Return the result file: medians over the repeats, and all steps that they come from."""
    rows = []
    for lengths in LENGTHS:
        for framework in FRAMEWORKS:
            of = [r["steps"][args.skip :] for r in runs if (r["framework"], r["lengths"]) == (framework, lengths)]
            each = [summary(steps) for steps in of]
            row: dict[str, Any] = {"lengths": lengths, "framework": framework, "samples_per_step": NUM_SAMPLES}
            for name in each[0]:
                if name != "breakdown":
                    row[name] = median(s[name] for s in each)
            row["breakdown"] = {p: round(median(s["breakdown"][p] for s in each), 3) for p in each[0]["breakdown"]}
            row["seconds_per_step_of_each_repeat"] = [s["seconds_per_step"] for s in each]
            rows.append(row)
    headline = {}
    for lengths in LENGTHS:
        instep, trl = (next(r for r in rows if (r["framework"], r["lengths"]) == (f, lengths)) for f in FRAMEWORKS)
        headline[f"{lengths}_step_ratio_to_trl"] = round(trl["seconds_per_step"] / instep["seconds_per_step"], 2)
        tokens = instep["response_tokens_per_second"] / trl["response_tokens_per_second"]
        headline[f"{lengths}_tokens_ratio_to_trl"] = round(tokens, 2)
    return {
        "benchmark": "cpu-grpo",
        "device": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "trl_versions": trl_versions,
        "configuration": {
            "cores": len(cores),
            "threads": {
                "instep": f"{args.threads} in the worker and, in turn with it, one less in the engine (if over 2); "
                "controller and reward workers besides; all pinned to these cores",
                "trl": f"{args.threads} in the one process, pinned to the same cores",
            },
            "steps": args.steps,
            "skipped_steps": args.skip,
            "repeats": len(runs) // 4,
            "max_new_tokens": args.max_new_tokens,
            "instep": shlex.join([*grpo_settings(), *quickstart.ADAM]),
            "trl": "benchmarks/trl/run_trl.py",
        },
        "rows": rows,
        "headline": headline,
        "runs": [{**run, "steps": [{k: round(v, 4) for k, v in s.items()} for s in run["steps"]]} for run in runs],
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"GRPO on a CPU: {result['device']}, {result['configuration']['cores']} cores")
    names = ("lengths", "framework", "seconds_per_step", "response_tokens_per_second", "response_length_mean")
    for name in (*names, "breakdown"):
        table.add_column(name.replace("_", " "))
    for row in result["rows"]:
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["breakdown"].items())
        table.add_row(*(str(row[name]) for name in names), parts)
    Console(width=160).print(table)
    print(json.dumps(result["headline"]))


if __name__ == "__main__":
    main()

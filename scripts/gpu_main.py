"""Runs of the main job with real vLLM or SGLang on the GPU of the trainer, by every way of the weights.

    python scripts/gpu_main.py --out DIR [--only NAME ...] [--limit 540] [--side-by-side 2] [--list]
    python scripts/gpu_main.py --out DIR --tests [WORD ...] [--side-by-side 4]

Each job is `instep train` of a random model of 0.6 B dimensions (16 prompts x 8 samples x (128 + 128) tokens a step,
10 steps); job `4b` takes 2 steps, with a KV cache of 40 GiB. With --tests each job is a file of tests/gpu (whose name
has one of the words), and what it prints. Jobs begin in their order, --side-by-side at a time; those that offload have
the GPU alone: vLLM cannot sleep while others take memory. Models lie in --models, logs and runs in DIR. At the end, or
after --limit seconds, a table shows what was measured; DIR/table.json holds it, too. `--device cpu --tiny` tries all of
it without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import only_visible  # noqa: E402
from benchmarks.random_model import dimensions, prompt  # noqa: E402
from instep.observability.versions import versions  # noqa: E402
from scripts.gpu_vllm import end  # noqa: E402

COMMON = "--input-key prompt --rm-type random --rollout-batch-size 16 --n-samples-per-prompt 8 "
COMMON += "--lr 1e-5 --lr-decay-style constant --use-dynamic-batch-size --actor-num-gpus-per-node 1 "
ON_VLLM = "--rollout-backend vllm --vllm-max-model-len 512"
ON_SGLANG = "--rollout-backend sglang --sglang-context-length 512 --sglang-max-running-requests 256 "
ON_SGLANG += "--sglang-cuda-graph-max-bs 128 --sglang-mem-fraction-static 0.2 --sglang-disable-custom-all-reduce "
ON_SGLANG += "--colocate --max-tokens-per-gpu 8192"
SMALL = "--colocate --vllm-gpu-memory-utilization 0.2 --vllm-kv-cache-memory-bytes 4294967296 --max-tokens-per-gpu 8192"
LARGE = "--colocate --vllm-gpu-memory-utilization 0.65 --vllm-kv-cache-memory-bytes 42949672960 "
LARGE += "--max-tokens-per-gpu 8192 --recompute-granularity full"
ON_CPU = "--device cpu --precision bf16 --rollout-num-gpus 1 --max-tokens-per-gpu 8192"
AWAKE = "--no-offload-train --no-offload-rollout"
STEPS = 10
WAYS = {  # in the order of their importance
    "ipc-hf": "--train-backend hf --weight-sync ipc --offload",
    "single-copy-hf": "--train-backend hf --weight-sync single-copy",
    "lora-hf": "--train-backend hf --weight-sync lora --lora-rank 16 " + AWAKE,
    "lora-megatron": "--train-backend megatron --weight-sync lora --lora-rank 16 " + AWAKE,
    "ipc-megatron": "--train-backend megatron --weight-sync ipc --offload",
    "single-copy-megatron": "--train-backend megatron --weight-sync single-copy",
    "shm-hf": "--train-backend hf --weight-sync shm " + AWAKE,
    "ipc-hf-awake": "--train-backend hf --weight-sync ipc " + AWAKE,
    "4b": "--train-backend hf --weight-sync ipc --offload",
    "sglang-ipc-hf": "--train-backend hf --weight-sync ipc --offload",
    "sglang-single-copy-hf": "--train-backend hf --weight-sync single-copy",
    "sglang-lora-hf": "--train-backend hf --weight-sync lora --lora-rank 16 " + AWAKE,
}


@dataclass
class Job:
    name: str
    command: list[str]
    steps: int
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float | None = None  # None: it has not ended
    code: int | None = None
    peak: dict[str, float] = field(default_factory=dict)  # of the whole GPU while it ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "instep-models")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--tests", nargs="*", metavar="WORD", help="files of tests/gpu instead, each in a process")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--eager", action="store_true", help="compile nothing, neither engine nor trainer: starts sooner"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of both sizes")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args()
    deadline, out = time.monotonic() + options.limit, options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    jobs = [job(name, options, out) for name in options.only] if options.tests is None else tests(options.tests, out)
    if options.list:
        print("\n\n".join(" ".join(job.command) for job in jobs))
        return 0
    compile_vllm()
    sizes = {size_of(job.name, options.tiny): None for job in jobs if job.steps}
    with ThreadPoolExecutor(1) as pool:  # the large model is made while the first jobs run
        made = {size: pool.submit(make, options, out, size) for size in sizes}

        def ready(job: Job) -> bool:
            return not job.steps or made[size_of(job.name, options.tiny)].done()

        run_all(jobs, ready, out, options.side_by_side, deadline)
    rows = [row(job, out) for job in jobs]
    about = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "side_by_side": options.side_by_side}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    (out / "table.json").write_text(json.dumps({"device": gpu, **about, "rows": rows}, indent=1) + "\n")
    print("\n".join(map(text, rows)))
    return 0 if all(r["passed"] for r in rows) else 1


def size_of(name: str, tiny: bool) -> str:
    return "tiny" if tiny else "4b" if name == "4b" else "0.6b"


def make(options: argparse.Namespace, out: Path, size: str) -> None:
    """The model in a process of its own, which gives its GPU memory back; and the prompts."""
    began, folder = time.monotonic(), options.models / f"{size}-0"
    with (out / f"model-{size}.log").open("wb") as log:
        command = [sys.executable, "benchmarks/random_model.py", size, str(folder), "--device", options.device]
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    texts = [prompt(128, int(dimensions(size)["vocab_size"]), seed) for seed in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    print(f"model {size}: {time.monotonic() - began:.0f} s", flush=True)


def job(name: str, options: argparse.Namespace, out: Path) -> Job:
    large = name == "4b"
    steps = min(2, options.steps) if large else options.steps
    model = options.models.absolute() / f"{size_of(name, options.tiny)}-0"
    length = 16 if options.device == "cpu" else 128
    where = ON_CPU if options.device == "cpu" else LARGE if large else SMALL
    where = f"{ON_VLLM} {where}"
    if name.startswith("sglang"):
        where = f"--rollout-backend sglang {ON_CPU}" if options.device == "cpu" else ON_SGLANG
    words = f"train --hf-checkpoint {model} --prompt-data {model}/train.jsonl {COMMON} --num-rollout {steps} "
    words += f"--rollout-max-response-len {length} --run-dir {out}/{name} {where} {WAYS[name]}"
    if options.eager:
        words += " --no-torch-compile " + (
            "--sglang-disable-cuda-graph" if "sglang" in name else "--vllm-enforce-eager"
        )
    return Job(name, [sys.executable, "-m", "instep.cli", *words.split()], steps)


def compile_vllm() -> None:
    """Make vLLM's bytecode with all cores, where it was installed without: each process of an engine would make it."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None and not (Path(spec.origin).parent / "__pycache__").exists():
        began = time.monotonic()
        words = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(Path(spec.origin).parent)]
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(f"vLLM's bytecode: {time.monotonic() - began:.0f} s", flush=True)


def tests(words: list[str], out: Path) -> list[Job]:
    """A job for each file of tests/gpu; their folders, with the logs of engines, stay in `out`."""
    files = sorted(
        f for f in (ROOT / "tests" / "gpu").glob("test_*.py") if not words or any(w in f.name for w in words)
    )
    pytest = [sys.executable, "-m", "pytest", "-q", "-rPfEs", "-p", "no:cacheprovider", "--durations=5", "--tb=short"]
    pytest += ["-m", "gpu", "-o", "tmp_path_retention_policy=all"]
    return [Job(f.stem, [*pytest, f"--basetemp={out}/tmp-{f.stem}", str(f.relative_to(ROOT))], steps=0) for f in files]


def run_all(jobs: list[Job], ready: Callable[[Job], bool], out: Path, at_once: int, deadline: float) -> None:
    """Run the jobs in their order, those that offload alone. At the deadline those that still run are ended."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    env.setdefault("VLLM_CACHE_ROOT", str(out.parent / "vllm-cache"))  # the second start of an engine is warm
    waiting, running, looked = list(jobs), list[Job](), 0.0
    try:
        while (waiting or running) and time.monotonic() < deadline:
            alone = [j for j in (*running, *waiting[:1]) if "--offload" in WAYS.get(j.name, "").split()]
            room = not running if alone else len(running) < at_once
            if waiting and room and ready(waiting[0]):
                running.append(start(waiting.pop(0), env, out))
            if time.monotonic() - looked > 2:
                looked, used = time.monotonic(), memory_used()
                for j in running:
                    j.peak = {gpu: max(used[gpu], j.peak.get(gpu, 0.0)) for gpu in used}
            for j in [j for j in running if j.process is not None and j.process.poll() is not None]:
                running.remove(j)
                finish(j)
            time.sleep(0.1)
    finally:
        end([j.process for j in running if j.process is not None])
        for j in running:
            finish(j)


def start(job: Job, env: dict[str, str], out: Path) -> Job:
    job.began = time.monotonic()
    with (out / f"{job.name}.log").open("wb") as log:
        more: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        job.process = subprocess.Popen(job.command, cwd=ROOT, env=env, **more)
    return job


def finish(job: Job) -> None:
    assert job.process is not None
    job.seconds, job.code = time.monotonic() - job.began, job.process.wait()
    print(f"{job.name} ended with {job.code} after {job.seconds:.0f} s", flush=True)


def memory_used() -> dict[str, float]:
    """GiB in use by all processes, by GPU that is seen here; empty where nvidia-smi does not tell it."""
    query = ["nvidia-smi", *only_visible(), "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {f"gpu{i.strip()}": float(used) / 1024 for i, used in (line.split(",") for line in lines)}


def row(job: Job, out: Path) -> dict[str, Any]:
    """What a job has measured: the median of each metric over its steps but the first, and the first's."""
    metrics, log = out / job.name / "metrics.jsonl", out / f"{job.name}.log"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [r for r in rows if "train/loss" in r]
    words = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    errors = [line.strip() for line in words if "Error:" in line]
    last = words[-1] if words else "no output"
    error = None if job.code == 0 else "not run" if job.process is None else (errors or [last])[0]
    return {
        "job": job.name,
        "passed": job.code == 0 and len(steps) == job.steps,
        "seconds": job.seconds,
        "steps": len(steps),
        "error": error,
        "cause": None if error is None else cause(out / job.name / "logs"),
        "printed": printed(words) if not job.steps else [],
        "first": numbers(steps[:1]),
        "median": numbers(steps[1:] or steps),
        "gpu_peak_gib": job.peak,
    }


def cause(logs: Path) -> str | None:
    """The first error in the logs of a run's engines and workers."""
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        if found := [line.strip() for line in lines if re.search(r"\b[A-Z]\w*(Error|Exception):", line)]:
            return f"{log.name}: {found[0][:400]}"
    return None


def printed(words: list[str]) -> list[str]:
    """What the tests of a log have printed, and its last line."""
    found, inside = list[str](), False
    for word in words:
        inside = "Captured stdout" in word if word.startswith(("---", "===", "___")) else inside
        found += [word] if inside and not word.startswith("---") else []
    return [*found, *words[-1:]]


def numbers(steps: list[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [s[name] for s in steps if isinstance(s.get(name), (int, float))] for name in names}
    return {name: median(values) for name, values in found.items() if values}


def text(row: dict[str, Any]) -> str:
    """The row as lines: seconds by part with those of the first step in brackets, bytes as GiB, the proofs."""
    first, now, lines = row["first"], row["median"], []
    seconds = f"{row['seconds']:.0f} s" if row["seconds"] is not None else "-"
    lines.append(f"{'pass' if row['passed'] else 'FAIL'}  {row['job']:21} {seconds:>6}  {row['steps']} steps")
    if row["error"]:
        lines[0] += f"  {row['error'][:300]}"
    lines += [f"        {row['cause']}"] if row["cause"] else []
    for prefix in sorted({name.partition("/")[0] for name in now} & {"perf", "sync", "memory", "turns"}):
        mine = {name.partition("/")[2]: value for name, value in now.items() if name.startswith(prefix + "/")}
        timed = [
            f"{n.removesuffix('_seconds')} {v:.3f} ({first.get(f'{prefix}/{n}', v):.3f})"
            for n, v in mine.items()
            if n.endswith("_seconds")
        ]
        sized = [f"{n.removesuffix('_bytes')} {v / 2**30:.2f}" for n, v in mine.items() if n.endswith("bytes")]
        rest = [f"{n} {v:.3g}" for n, v in mine.items() if not n.endswith(("_seconds", "bytes"))]
        lines += [
            f"        {prefix}, {what}: {', '.join(found)}"
            for what, found in (("s", timed), ("GiB", sized), ("other", rest))
            if found
        ]
    proofs = [
        f"{n} {now[f'train/{n}']:.2e}"
        for n in ("log_prob_gap_mean", "log_prob_gap_max", "loss", "grad_norm")
        if f"train/{n}" in now
    ]
    lines += ["        " + ", ".join(proofs)] if proofs else []
    lines += [f"        GPU, all processes, GiB: {row['gpu_peak_gib']}"] if row["gpu_peak_gib"] else []
    lines += [f"        {line}" for line in row["printed"][-40:]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""GRPO on one GPU, whole steps: instep with either backend against TRL's `GRPOTrainer`, both with vLLM colocated.

    python benchmarks/gpu_grpo.py [--size 0.6b] [--new-tokens 512] [--steps 5] [--only NAME ...] [--out FILE]

Random Qwen3 weights; 32 prompts of 128 tokens x 8 samples a step (instep: --samples in all), `--new-tokens` tokens each
(a random model ends one of 300 earlier), one optimizer step. `--lengths mixed` (instep only): prompts of 64 to 256
tokens, and 450 tokens end a response, so that lengths are geometric, cut off at `--new-tokens`. instep runs as a user
runs it: fp32 masters, the log-prob of every sampled token, sync sessions with their proof. By name: with
`instep-hf-turns` trainer and engine free their memory for each other, `instep-sglang` has SGLang's engine and the
router in place of vLLM. `trl` has the settings of its own documentation, `trl-tuned` no gradient checkpointing, and the
largest of 16, 8 and 4 samples a pass that fits. `verl` and `verl-tuned` (by name) are verl, which `gpu_session.sh
prepare verl` packs, in $VERL_SITE (~/verl); `verl/settings.py` says what is set. They run in turn on one machine; the
first step of each does not count. With two GPUs, by name: `instep-hf-apart` trains on one and generates on the other,
`instep-hf-dp2` and `-tp2` do both on both, with two engines and with one of TP 2. `phases` are the seconds of a step:
`generate` while requests were under way, `idle` in no phase. `start_s` are the seconds to the first rollout; the model
lies in --models, so that a second run finds what vLLM has compiled for it. A run that fails is a row with its error.
--add keeps the rows of --out for other names: of the same machine and code. With --stacks SECONDS py-spy records where
each process of instep is, after the third step, into --logs; such a run's seconds do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.random_model import SIZES, dimensions, prompt  # noqa: E402
from instep.observability import floors  # noqa: E402
from instep.observability.versions import versions  # noqa: E402

GROUP, SAMPLES, PROMPT = 8, 256, 128
INSTEP = f"--input-key prompt --n-samples-per-prompt {GROUP} --lr 1e-6"
# SGLang leaves the last two places of a context empty.
SGLANG = "--rollout-backend sglang --sglang-disable-custom-all-reduce --sglang-context-length"
SHARED = "--colocate --actor-num-gpus-per-node"
MIXED = (64, 256)  # tokens of prompts
ENDS = 450 / 151936  # share of the tokens that end a response of mixed length
RUNS = {
    "instep-hf": f"--train-backend hf {SHARED} 1",
    "trl": "",
    "instep-megatron": f"--train-backend megatron {SHARED} 1",
    "trl-tuned": "--no-checkpointing --per-device-batch",
}
BY_NAME = {
    "instep-hf-turns": f"--train-backend hf {SHARED} 1 --offload",
    "instep-sglang": f"--train-backend hf {SHARED} 1",
    "verl": "",
    "verl-tuned": "--tuned",
}
ON_TWO = {
    "instep-hf-apart": "--train-backend hf --actor-num-gpus-per-node 1 --rollout-num-gpus 1",
    "instep-hf-dp2": f"--train-backend hf {SHARED} 2",
    # Its own all-reduce maps memory of several GPUs, which not every host allows.
    "instep-hf-tp2": f"--train-backend hf {SHARED} 2 --rollout-num-gpus-per-engine 2 --vllm-disable-custom-all-reduce",
    "instep-sglang-pd": f"--train-backend hf {SHARED} 2 --prefill-num-servers 1 "
    "--sglang-disaggregation-transfer-backend nixl --no-offload-rollout",
    "instep-sglang-apart": "--train-backend hf --actor-num-gpus-per-node 1 --rollout-num-gpus 1",
    "instep-sglang-tp2": f"--train-backend hf {SHARED} 2 --rollout-num-gpus-per-engine 2",
}
TUNED = {  # the first that fits
    "trl-tuned": (16, 8, 4),  # samples a pass; with 0.6 B dimensions 32 do not fit beside vLLM's 0.35 of 80 GB
    "verl-tuned": (32768, 16384, 8192),  # tokens a pass, with which vLLM sleeps
}
VERL_SITE = Path(os.environ.get("VERL_SITE", Path.home() / "verl"))
EARLY = (
    "perf/early_log_probs_seconds",
    "perf/early_train_seconds",
)  # a run in which nothing is early has no such metric


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """The peer's reward (for --custom-rm-path)."""
    return sum(map(ord, sample.response[:64])) % 97 / 97


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="a step, of instep")
    parser.add_argument("--lengths", choices=("even", "mixed"), default="even")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=RUNS | BY_NAME | ON_TWO, default=list(RUNS), metavar="NAME")
    parser.add_argument("--more", default="", help="further flags of instep")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script, without TRL"
    )
    parser.add_argument("--limit", type=float, default=400, help="seconds for each run")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "instep-models")
    parser.add_argument("--stacks", type=int, default=0, metavar="SECONDS", help="record stacks (py-spy in PATH)")
    parser.add_argument("--logs", type=Path, help="a folder for logs and metrics; default: removed at the end")
    parser.add_argument("--add", action="store_true", help="to the rows that --out has")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    if options.samples % GROUP or (
        options.samples != SAMPLES and not all(n.startswith("instep") for n in options.only)
    ):
        parser.error(f"--samples must be a multiple of {GROUP}, and {SAMPLES} for TRL and verl")
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        folder = options.logs.absolute() if options.logs else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = options.models.absolute() / f"{options.size}-0"
        make = [sys.executable, str(ROOT / "benchmarks" / "random_model.py"), options.size, str(model)]
        subprocess.run([*make, "--device", options.device], check=True)  # its process gives the memory back
        vocab_size, mixed = int(dimensions(options.size)["vocab_size"]), options.lengths == "mixed"
        rng = random.Random(0)
        texts = [prompt(rng.randint(*MIXED) if mixed else PROMPT, vocab_size, seed) for seed in range(256)]
        (model / "train.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        rows = json.loads(options.out.read_text())["rows"] if options.add else []
        rows = [row for row in rows if row["name"] not in options.only]
        for name in options.only:
            rows.append({"name": name, **measure_fitting(options, name, model, folder)})
            print(json.dumps(rows[-1]), flush=True)
            result = report(options, rows)
            if options.out:  # what comes next may be cut off
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["headline"]))


def measure_fitting(options: argparse.Namespace, name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run one; those in `TUNED` with less in a pass as long as they are out of memory."""
    found: dict[str, Any] = {}
    batches = TUNED.get(name, (None,))
    for batch in batches[1:] if name == "verl-tuned" and options.size == "1.7b" else batches:
        found = measure(options, name, model, folder, *([] if batch is None else [str(batch)]))
        unit = "per_device_batch" if name == "trl-tuned" else "max_token_len"
        found |= {} if batch is None else {unit: batch}
        if "OutOfMemoryError" not in str(found.get("error")):
            break
    return found


def measure(options: argparse.Namespace, name: str, model: Path, folder: Path, *more_words: str) -> dict[str, Any]:
    """Run one; returns its figures, or its error."""
    ours, out = name.startswith("instep"), folder / name
    verl = name.startswith("verl")
    if ours:
        words = f"-m instep.cli train {flags(options, name, model, out)}"
    else:
        program = f"verl/run_verl.py --limit {options.limit - 15}" if verl else "trl/run_trl_gpu.py"
        words = f"{ROOT}/benchmarks/{program} --model {model} --data {model}/train.jsonl "
        words += " ".join(((RUNS | BY_NAME)[name], *more_words, ""))
        words += f"--steps {options.steps} --new-tokens {options.new_tokens} --out {out}.json"
    places = [str(VERL_SITE) if verl else "", str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, places))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began, log = time.time(), folder / f"{name}.log"
    try:
        more: dict[str, Any] = {"cwd": folder, "env": env, "stderr": subprocess.STDOUT}
        with log.open("wb") as file, subprocess.Popen([sys.executable, *words.split()], stdout=file, **more) as process:
            try:
                if ours and options.stacks:
                    record_stacks(process, out, options.stacks)
                if process.wait(timeout=max(0.0, began + options.limit - time.time())):
                    raise subprocess.CalledProcessError(process.returncode, name)
            finally:
                process.kill()
    except subprocess.SubprocessError as error:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        errors = errors[-8:] if verl else errors[:1]  # the first ones of Ray's many processes say little
        return {"error": errors or [str(error)], "log": lines[-30 if verl else -3 :]}
    return {
        "whole_s": round(time.time() - began, 1),
        **({"samples": options.samples} if ours else {}),
        **(of_instep(out, began) if ours else of_verl(out) if verl else of_trl(folder / f"{name}.json")),
    }


def flags(options: argparse.Namespace, name: str, model: Path, out: Path) -> str:
    """Those of `instep train`; the plan chooses the size of micro-batches."""
    words = f"--hf-checkpoint {model} --prompt-data {model}/train.jsonl {INSTEP} {(RUNS | BY_NAME | ON_TWO)[name]} "
    words += f"--rollout-batch-size {options.samples // GROUP} "
    words += f"--custom-rm-path benchmarks.gpu_grpo.reward --rollout-max-response-len {options.new_tokens} "
    longest = MIXED[1] + options.new_tokens
    engine = f"{SGLANG} {longest + 2}" if "sglang" in name else f"--rollout-backend vllm --vllm-max-model-len {longest}"
    words += f"{engine} --run-dir {out} --device {options.device} --num-rollout {options.steps} "
    if options.lengths == "mixed":
        num = max(1, round(ENDS * int(dimensions(options.size)["vocab_size"])))
        words += f"--rollout-stop-token-ids {' '.join(map(str, range(100, 100 + num)))} "
    return words + str(options.more)


def record_stacks(process: subprocess.Popen[bytes], run: Path, seconds: int) -> None:
    """After the third step record all processes of the run with py-spy, into stacks-PID.txt beside the run's folder."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("train/loss") >= 3):
        time.sleep(0.2)
    if process.poll() is not None:
        return
    known = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    words = ["py-spy", "record", "--nonblocking", "-t", "-r", "100", "-d", str(seconds), "-f", "raw"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    spies = [
        subprocess.Popen([*words, "-o", str(run.parent / f"stacks-{pid}.txt"), "--pid", str(pid)], **quiet)
        for pid in known
    ]
    for spy in spies:
        spy.wait(timeout=seconds + 60)


def of_instep(run: Path, began: float) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    seconds = [after["time"] - before["time"] for before, after in zip(rows, rows[1:], strict=False)]
    kept = ("perf/", "sync/", "memory/", "turns/")
    of = ("seconds", "bytes", "tokens_per_second", "arrays", "idle_ratio")
    names = sorted({n for n in rows[-1] if n.startswith(kept) and any(part in n for part in of)})
    parts = {n: round(median(row[n] for row in rows[1:]), 4) for n in names if all(n in row for row in rows[1:])}
    parts = dict.fromkeys(EARLY, 0.0) | parts
    gap = {n: rows[-1][n] for n in ("train/log_prob_gap_mean", "train/log_prob_gap_max") if n in rows[-1]}
    # The first row counts the first session, too, which belongs to the start.
    first = rows[0]["perf/rollout_seconds"] + rows[0]["perf/train_seconds"] + parts.get("perf/sync_seconds", 0.0)
    start = {"start_s": round(rows[0]["time"] - first - began, 1)}
    step = median(seconds)
    phases = {"phases": phases_of(step, parts)}
    return {"step_s": step, "steps_s": [round(s, 3) for s in seconds], **start, **phases, "parts": parts, **gap}


def phases_of(step_s: float, parts: dict[str, float]) -> dict[str, float]:
    """Seconds of a step by phase, which add up to it."""
    seconds = {
        name: parts.get(f"perf/{name}_seconds", 0.0) for name in ("rollout", "reward", "log_probs", "train", "sync")
    }
    out = {
        "generate": seconds["rollout"] - seconds["reward"],
        "reward": seconds["reward"],
        "log_probs": seconds["log_probs"],
        "train": seconds["train"] - seconds["log_probs"],
        "sync": seconds["sync"],
    }
    return {name: round(value, 3) for name, value in {**out, "idle": step_s - sum(out.values())}.items()}


def of_trl(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    seconds = [row["seconds"] for row in found["steps"][1:]]
    about = {"peak_gib": found["steps"][-1]["peak_gib"], "versions": found["versions"]}
    return {"step_s": median(seconds), "steps_s": [round(s, 3) for s in seconds], **about}


def of_verl(out: Path) -> dict[str, Any]:
    found = json.loads(out.with_suffix(".json").read_text())
    steps = found["steps"][1:]
    step = median(row["seconds"] for row in steps)
    phases = {
        name: round(median(row[name] for row in steps), 3)
        for name in ("generate", "log_probs", "advantages", "train", "sync")
    }
    last = found["steps"][-1]["metrics"]
    kept = {
        name: last[name] for name in sorted(last) if name.startswith(("perf/", "response_length/", "training/rollout"))
    }
    return {
        "step_s": step,
        "steps_s": [round(row["seconds"], 3) for row in steps],
        "verl_step_s": round(median(row["verl_step"] for row in steps), 3),
        "phases": {**phases, "idle": round(step - sum(phases.values()), 3)},
        "metrics": kept,
        "versions": found["versions"],
        "settings": found["settings"],
    }


def add_rooflines(result: dict[str, Any]) -> None:
    """Give each row of instep by phase the tokens/s that the card's peak allows, and how many times longer it took.

    Tokens are those of `perf/*_tokens_per_second`, and all responses as long as they may be: rows of mixed lengths get
    none. `rollout` is held against decoding, `train` against forward, backward and an optimizer step (`floors.py`).
    """
    peak = floors.peak_of({"card": result["device"]})
    for row in result["rows"]:
        of = {**result["workload"], **row}
        if peak is None or "parts" not in row or of.get("lengths") == "mixed":
            continue
        model = floors.Model.of({"model_type": "qwen3", **dimensions(of["size"])}, 2)
        assert model is not None
        num, prompt, new = of["samples"], of["prompt"], of["new_tokens"]
        samples, parts = [(prompt, new)] * num, row["parts"]
        gpus = 2 if of["name"] in ON_TWO and not of["name"].endswith("apart") else 1  # of each phase
        split = 2 if of["name"].endswith("tp2") else 1
        train = floors.training(model, samples, peak, gpus) + floors.optimizer(model, peak, gpus)
        took = parts["perf/train_seconds"] + parts.get("perf/early_train_seconds", 0.0)
        phases = {
            "rollout": (
                num * new,
                floors.decoding(model, samples, peak, gpus // split, split),
                parts["perf/rollout_seconds"],
            ),
            "train": (num * (prompt + new), train, took),
        }
        row["roofline"] = {
            phase: {"tokens_per_second": round(tokens / least), "factor": round(seconds / least, 2)}
            for phase, (tokens, least, seconds) in phases.items()
        }


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    measured = {row["name"]: row["step_s"] for row in rows if "step_s" in row}
    headline = {
        f"{ours}_over_{peer}": round(measured[peer] / measured[ours], 2)
        for ours in ("instep-hf", "instep-hf-turns", "instep-megatron", "instep-sglang")
        for peer in ("trl", "trl-tuned", "verl", "verl-tuned")
        if {ours, peer} <= measured.keys()
    }
    if {"instep-hf", "instep-hf-dp2"} <= measured.keys():
        headline["two_gpus_over_one"] = round(measured["instep-hf"] / measured["instep-hf-dp2"], 2)
    for row in rows:
        if "step_s" in row:
            row["samples_per_s"] = round(row.get("samples", SAMPLES) / row["step_s"], 1)
            if row["name"] in ON_TWO:
                row["samples_per_s_of_a_gpu"] = round(row["samples_per_s"] / 2, 1)
            tokens = row.get("samples", SAMPLES) * options.new_tokens
            if options.lengths == "mixed" and "parts" not in row:
                continue
            if options.lengths == "mixed":
                tokens = row["parts"]["perf/rollout_tokens_per_second"] * row["parts"]["perf/rollout_seconds"]
            row["response_tokens_per_s"] = round(tokens / row["step_s"])
    result = {
        "benchmark": "gpu_grpo",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "workload": {
            "size": options.size,
            "samples": options.samples,
            "prompt": PROMPT,
            "new_tokens": options.new_tokens,
            "lengths": options.lengths,
        },
        "flags": f"{INSTEP} {options.more}".strip(),
        "rows": rows,
        "headline": headline,
    }
    add_rooflines(result)
    return result


if __name__ == "__main__":
    main()

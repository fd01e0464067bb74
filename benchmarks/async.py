"""Asynchronous against synchronous training: the same samples, the engine and the trainer on disjoint cores or GPUs,
or both on one GPU.

    python benchmarks/async.py [--rollouts 20] [--seeds 0 1 2] [--out FILE]
    python benchmarks/async.py --device cuda [--rollouts 20] [--more FLAGS] [--out FILE]

Five commands train a random model on a task whose responses have heavy-tailed lengths (`length_law.py`): `instep
train` in turns (with a hook that sees whole rollouts, so that nothing is trained before a rollout has ended) and as it
is, `instep train-async` (one step ahead), and that with `--max-staleness 2` and `4`, each from the same weights, with
the same prompts and lengths; nothing sleeps but a request that an abort has ended, for 20 ms. Responses that go on
through a sync stay in the engine. On a CPU the engine (the embedded one) has one core, trainer and controller the
other. On GPUs the engine is vLLM, the model has 0.6 B dimensions; where there are two GPUs engine and trainer have one
each, else both share one and keep their memory all the time. Samples a second are those of all rollouts but the first
ones, by the clock between the rows of metrics.jsonl; the reward is that of held-out prompts under the last weights.

The bounds are those of a simulator of the same lengths and schedules (`async_simulator.py`), as multiples of what
`instep train` has reached. Its rates are those of the run in turns, where each side works alone: how long after its
round's beginning each response ended, and the seconds of training, sync and all else. On one card its `slow` is the sum
of the shares of the time in which the card is busy while it generates and while it trains (nvidia-smi), at least 1;
where nvidia-smi does not tell, 2: one of them always waits for the other.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from instep.observability.versions import versions

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from async_simulator import AHEAD, IN_TURNS, Rates, fit_engine, samples_per_s  # noqa: E402
from length_law import LONGEST, MEDIAN, SHORTEST, SIGMA, VOCABULARY, length  # noqa: E402
from machine import cores, only_visible  # noqa: E402
from random_model import dimensions, prompt, save_tokenizer  # noqa: E402

PROMPTS, GROUP, PROMPT_LENGTH, HELD_OUT = {"cpu": 16, "cuda": 32}, 8, 16, 64
LATE = 124  # as the exit code of a run that was interrupted
ENDING = 20.0  # seconds in which a run that was interrupted ends its processes
TILT = 0.1  # of the embeddings of 150,000 words, see `random_model.py`
SKIPPED = 3  # first rollouts of a run, in which queues fill and processes warm up
MODEL: dict[str, Any] = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4)
MODEL |= dict(num_key_value_heads=2, head_dim=64, vocab_size=VOCABULARY, tie_word_embeddings=True)
KEEP = ("--pause-mode", "keep")  # as by default, but for a generate function of one's own with vLLM 0.26
SYNCHRONOUS = "synchronous"
MODES: dict[str, tuple[str, ...]] = {
    IN_TURNS: ("train", "--rollout-all-samples-process-path", "length_law.whole_rollouts"),
    SYNCHRONOUS: ("train",),
    AHEAD: ("train-async",),
    "2 versions": ("train-async", "--max-staleness", "2", *KEEP),
    "4 versions": ("train-async", "--max-staleness", "4", *KEEP),
}
NAMES = {AHEAD: "", "2 versions": "_2_versions", "4 versions": "_4_versions"}  # the ends of their keys in `headline`
SCHEDULES: dict[str, str | int] = {IN_TURNS: IN_TURNS, AHEAD: AHEAD, "2 versions": 2, "4 versions": 4}
FLAGS = f"--input-key prompt --n-samples-per-prompt {GROUP} --rollout-shuffle "
FLAGS += f"--rollout-max-response-len {LONGEST} --custom-generate-function-path length_law.generate "
FLAGS += "--custom-rm-path length_law.reward --train-backend hf --actor-num-gpus-per-node 1 "
FLAGS += "--use-dynamic-batch-size --lr-decay-style constant --weight-decay 0 --clip-grad 1 --use-tis "
ON_CPU = "--device cpu --rollout-num-gpus 1 --max-tokens-per-gpu 8192 --lr 1e-3 --num-threads 1 "
ON_GPU = "--device cuda --lr 1e-4 --max-tokens-per-gpu 8192 "
VLLM = {
    "cpu": f"--vllm-kv-cache-memory-bytes {256 << 20} --vllm-max-model-len 1024 --vllm-max-num-seqs 512 ",
    "cuda": f"--vllm-gpu-memory-utilization 0.3 --vllm-kv-cache-memory-bytes {12 << 30} --vllm-max-model-len 1024 "
    "--vllm-max-num-seqs 512 ",
}
SHARED = "--colocate --no-offload-train --no-offload-rollout "
APART = "--rollout-num-gpus 1 "


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its run ends with it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rollout-backend", choices=("embedded", "vllm"), help="default: vllm on GPUs")
    parser.add_argument("--size", help="dimensions of random_model.py; default: 0.6b on GPUs, 5 M on a CPU")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--prompts", type=int, help=f"of a rollout, {GROUP} samples each; default: 16, on GPUs 32")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, on GPUs 0")
    parser.add_argument("--more", default="", help="further flags of instep")
    parser.add_argument("--limit", type=float, help="seconds for all of it; default: 1800 for each run")
    parser.add_argument("--logs", type=Path, help="a folder for runs and logs; default: removed at the end")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--add", action="store_true", help="to the runs that --out has, of the same machine and flags")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/async-DEVICE.json")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    given.rollout_backend = given.rollout_backend or ("vllm" if on_gpu else "embedded")
    given.size = given.size or ("0.6b" if on_gpu else None)
    given.prompts = given.prompts or PROMPTS[given.device]
    given.seeds = given.seeds if given.seeds is not None else [0] if on_gpu else [0, 1, 2]
    given.out = given.out or HERE / "results" / f"async-{given.device}.json"
    if given.rollouts <= SKIPPED:
        sys.exit(f"--rollouts must be more than the {SKIPPED} that do not count")
    if not on_gpu and len(os.sched_getaffinity(0)) < 2:
        sys.exit("engine and trainer want a core each; one is usable here")
    if given.list:
        for mode in given.modes:
            print(" ".join(command(given, Path("FOLDER"), mode, given.seeds[0])))
        return
    limit = given.limit or 1800.0 * len(given.seeds) * len(given.modes)
    deadline = time.monotonic() + limit - ENDING
    rows = json.loads(given.out.read_text())["rows"] if given.add and given.out.exists() else []
    for seed in given.seeds:
        with work_folder(given.logs, seed) as folder:
            make_inputs(given, folder, seed)
            for mode in given.modes:
                rows.append({"mode": mode, "seed": seed, **measure(given, folder, mode, seed, deadline)})
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                result = report(given, rows)  # so far
                given.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    sys.exit(any("error" in row for row in rows))


@contextlib.contextmanager
def work_folder(logs: Path | None, seed: int) -> Iterator[Path]:
    if logs is None:
        with tempfile.TemporaryDirectory(prefix="instep-bench-") as folder:
            yield Path(folder)
    else:
        folder = logs.absolute() / f"seed-{seed}"
        folder.mkdir(parents=True)
        yield folder


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def is_shared(given: argparse.Namespace) -> bool:
    """Whether engine and trainer share a card."""
    return bool(given.device == "cuda" and num_gpus() < 2)


def flags(given: argparse.Namespace) -> str:
    words = FLAGS + (ON_GPU if given.device == "cuda" else ON_CPU) + f"--rollout-backend {given.rollout_backend} "
    words += f"--rollout-batch-size {given.prompts} "
    words += VLLM[given.device] if given.rollout_backend == "vllm" else ""
    if given.device == "cuda":
        words += SHARED if is_shared(given) else APART
    return words + given.more


def make_inputs(given: argparse.Namespace, folder: Path, seed: int) -> None:
    if given.size:
        code = [sys.executable, str(HERE / "random_model.py"), given.size, str(folder / "model"), "--seed", str(seed)]
        code += ["--device", given.device, "--tilt", str(TILT)]
        subprocess.run(code, check=True)  # its process gives the memory back
    else:
        make_small_model(folder / "model", seed)
    words = int(json.loads((folder / "model" / "config.json").read_text())["vocab_size"])
    for name, number in (("train", given.rollouts * given.prompts), ("held-out", HELD_OUT)):
        seeds = range(1_000_000 * (seed + 1), 1_000_000 * (seed + 1) + number) if name == "train" else range(number)
        texts = (prompt(PROMPT_LENGTH, words, i) for i in seeds)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def make_small_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(max_position_embeddings=2048, eos_token_id=1, pad_token_id=0, **MODEL)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)


def command(given: argparse.Namespace, folder: Path, mode: str, seed: int) -> list[str]:
    name, *more = MODES[mode]
    words: list[Any] = [sys.executable, "-m", "instep.cli", name, "--hf-checkpoint", folder / "model"]
    words += [*flags(given).split(), *more, "--prompt-data", folder / "train.jsonl"]
    words += ["--eval-prompt-data", "held-out", folder / "held-out.jsonl", "--eval-interval", given.rollouts]
    words += ["--skip-eval-before-train", "--num-rollout", given.rollouts, "--seed", seed, "--rollout-seed", seed]
    return [str(word) for word in [*words, "--run-dir", run_folder(folder, mode)]]


def run_folder(folder: Path, mode: str) -> Path:
    return folder / mode.replace(" ", "-")


def measure(given: argparse.Namespace, folder: Path, mode: str, seed: int, deadline: float) -> dict[str, Any]:
    """Run one command; returns its samples a second, seconds by phase, and held-out reward; else its error."""
    if time.monotonic() >= deadline:
        return {"error": "no time was left", "log": []}
    words, out = command(given, folder, mode, seed), run_folder(folder, mode)
    path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    if given.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    pinned = sorted(os.sched_getaffinity(0))[:2] if given.rollout_backend == "embedded" else []
    with (folder / f"{out.name}.log").open("w+") as output, watching(given) as busy:
        run = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        ended = threading.Event()
        pinning = threading.Thread(target=pin, args=(run.pid, pinned, ended))
        pinning.start()
        try:
            code = run.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # so that it ends its processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(timeout=ENDING)
            code = LATE
        finally:
            run.kill()  # without effect on one that has ended
            ended.set()
            pinning.join()
        if code:
            output.seek(0)
            error = "its time was over" if code == LATE else f"exit code {code}"
            return {"error": error, "log": output.read()[-4000:].splitlines()}
    found = figures(given, out)
    return found | (simulated(given, out, busy) if mode == IN_TURNS else {})


@contextlib.contextmanager
def watching(given: argparse.Namespace) -> Iterator[list[tuple[float, float]]]:
    """(time, share of the last moments in which the card was busy), many times a second, where a card is shared."""
    busy: list[tuple[float, float]] = []
    if not is_shared(given) or shutil.which("nvidia-smi") is None:
        yield busy
        return
    words = "--query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 100".split()
    watcher = subprocess.Popen(["nvidia-smi", *only_visible(), *words], stdout=subprocess.PIPE, text=True)

    def read() -> None:
        for line in watcher.stdout or ():
            if line.strip().isdigit():
                busy.append((time.time(), int(line) / 100))

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield busy
    finally:
        watcher.terminate()
        watcher.wait(timeout=30)
        reading.join()


def simulated(given: argparse.Namespace, out: Path, busy: list[tuple[float, float]]) -> dict[str, Any]:
    """The rates of a run in turns, and the samples a second that each schedule reaches in the simulator with them."""
    steps = steps_of(out)
    rows = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    responses = {(r["group"], r["index"]): r for r in rows if r["ended"] < steps[-1]["time"]}  # not the evaluation's
    batch = given.prompts
    groups: list[list[int]] = [[] for _ in range(given.rollouts * batch)]
    rounds: list[list[dict[str, Any]]] = [[] for _ in range(given.rollouts)]
    for (group, _), response in sorted(responses.items()):
        groups[group].append(response["length"])
        rounds[group // batch].append(response)
    begins = [min(r["began"] for r in responses) for responses in rounds]
    ends = [[(r["length"], r["ended"] - t) for r in each] for each, t in zip(rounds, begins, strict=True)]
    first, step, running = fit_engine(ends[SKIPPED:])

    def of(phase: str) -> float:
        return mean(row[f"perf/{phase}_seconds"] for row in steps[SKIPPED:])

    lengths = [[r["length"] for r in each] for each in rounds[SKIPPED:]]
    train = of("train") / (mean(map(sum, lengths)) + batch * GROUP * PROMPT_LENGTH)
    rollout = first + mean(step * max(each) + running * sum(each) for each in lengths)
    whole = (steps[-1]["time"] - steps[SKIPPED - 1]["time"]) / len(lengths)
    other = max(0.0, whole - rollout - of("train") - of("sync"))
    most = 512 if given.rollout_backend == "vllm" else 256
    rates = Rates(step, running, train, of("sync"), other, first, most)
    shares = busy_shares(steps, busy) if is_shared(given) else {}
    slow = max(1.0, sum(shares.values())) if shares else 2.0 if is_shared(given) else 1.0
    more: dict[str, Any] = {"prompt": PROMPT_LENGTH, "slow": slow, "skipped": SKIPPED}
    reached = {mode: samples_per_s(groups, batch, schedule, rates, **more) for mode, schedule in SCHEDULES.items()}
    return {"rates": {**asdict(rates), "slow": slow}, "busy": shares, "simulated_samples_per_s": reached}


def busy_shares(steps: list[dict[str, Any]], busy: list[tuple[float, float]]) -> dict[str, float]:
    """The share of the time in which the card is busy while it generates, and while it trains."""
    found: dict[str, list[float]] = {"engine": [], "trainer": []}
    for before, row in zip(steps[SKIPPED - 1 :], steps[SKIPPED:], strict=False):
        begins = before["time"]
        for side, phase in (("engine", "rollout"), ("trainer", "train")):
            seconds = row[f"perf/{phase}_seconds"]
            # The driver tells of the moments before: the first ones of a phase are not the phase's.
            found[side] += [share for at, share in busy if begins + seconds / 3 < at < begins + seconds]
            begins += seconds
    return {side: mean(shares) for side, shares in found.items()} if all(found.values()) else {}


def steps_of(out: Path) -> list[dict[str, Any]]:
    rows = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


def figures(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = steps_of(out)
    assert len(steps) == given.rollouts
    seconds = steps[-1]["time"] - steps[SKIPPED - 1]["time"]
    counted = steps[SKIPPED:]
    found = {
        "samples_per_s": len(counted) * given.prompts * GROUP / seconds,
        "held_out_reward": next(row["eval/held-out/reward_mean"] for row in rows if "eval/held-out/reward_mean" in row),
        "staleness_mean": mean(row.get("async/staleness_mean", 0.0) for row in counted),
        "effective_sample_ratio": min(row["train/effective_sample_ratio"] for row in counted),
        "groups_dropped": sum(row.get("rollout/num_groups_stale", 0) for row in steps),
    }
    for phase in ("rollout", "wait", "early_train", "train", "sync"):
        found[f"{phase}_s"] = mean(row.get(f"perf/{phase}_seconds", 0.0) for row in counted)
    for side in ("trainer", "engine"):
        found[f"{side}_idle_ratio"] = mean(row[f"perf/{side}_idle_ratio"] for row in counted)
    return found


def pin(pid: int, two: list[int], ended: threading.Event) -> None:
    """Keep engine processes on the first core, all others of the run on the second; none where `two` is empty."""
    while two and not ended.wait(0.2):
        try:
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for process in processes:
                wanted = [two["instep.engines.embedded" not in process.cmdline()]]
                if process.cpu_affinity() != wanted:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, wanted)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
            continue


def headline_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the seeds: the bound and what is reached of the synchronous samples/s, and the share of the bound of
    the seeds that have both."""
    measured = {(row["mode"], row["seed"]): row for row in rows if "error" not in row}
    slow = {seed: row for (mode, seed), row in measured.items() if mode == SYNCHRONOUS}
    turns = {
        seed: row["simulated_samples_per_s"]
        for (mode, seed), row in measured.items()
        if mode == IN_TURNS and seed in slow
    }
    headline: dict[str, float] = {}
    for mode, name in NAMES.items():
        fast = {seed: measured[mode, seed] for seed in slow if (mode, seed) in measured}
        if turns:
            headline[f"bound{name}"] = median(turns[seed][mode] / slow[seed]["samples_per_s"] for seed in turns)
        if fast:
            ratio = median(row["samples_per_s"] / slow[seed]["samples_per_s"] for seed, row in fast.items())
            headline[f"samples_ratio{name}"] = ratio
            rewards = [row["held_out_reward"] - slow[seed]["held_out_reward"] for seed, row in fast.items()]
            headline["reward_difference"] = min(mean(rewards), headline.get("reward_difference", 1.0))
        if shares := [row["samples_per_s"] / turns[seed][mode] for seed, row in fast.items() if seed in turns]:
            headline[f"share_of_bound{name}"] = median(shares)
    return headline


def report(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "async",
        "device": device(given),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "workload": {
            "rollouts": given.rollouts,
            "skipped": SKIPPED,
            "prompts": given.prompts,
            "samples_per_prompt": GROUP,
            "length_law": f"log-normal, median {MEDIAN}, sigma {SIGMA}, cut at {SHORTEST} and {LONGEST}",
            "mean_length": mean(length(f"p{i}", i) for i in range(10000)),
            "model": dimensions(given.size) if given.size else MODEL,
            "flags": flags(given),
        },
        "rows": rows,
        "headline": headline_of(rows),
    }


def device(given: argparse.Namespace) -> str:
    import torch

    if given.device == "cpu":
        return cores()
    return torch.cuda.get_device_name() + (", shared" if is_shared(given) else ", one each")


def show(result: dict[str, Any]) -> None:
    table = Table(title="asynchronous training, median of the seeds")
    columns = ["samples_per_s", "rollout_s", "wait_s", "train_s", "sync_s", "trainer_idle_ratio", "engine_idle_ratio"]
    columns += ["staleness_mean", "held_out_reward"]
    for name in ("mode", *columns):
        table.add_column(name)
    for mode in MODES:
        mine = [row for row in result["rows"] if row["mode"] == mode and "error" not in row]
        if not mine:
            continue
        table.add_row(mode, *(f"{median(row[name] for row in mine):.3f}" for name in columns))
    Console(width=180).print(table)
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['mode']}, seed {row['seed']}: {row['error']}", *row["log"][-5:], sep="\n    ")
        if "rates" in row:
            print(json.dumps({name: row[name] for name in ("seed", "rates", "busy")}))
    found = result["headline"]
    for mode, name in NAMES.items():
        if (bound := found.get(f"bound{name}")) is not None:
            text = "not measured"
            if f"share_of_bound{name}" in found:
                share = found[f"share_of_bound{name}"]
                text = f"{found[f'samples_ratio{name}']:.2f} times are reached, {share:.0%} of it"
            print(f"{mode}: the simulator's bound is {bound:.2f} times the synchronous samples/s; {text}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Asynchronous against synchronous training on a CPU: the same samples, engine and trainer on a core each.

    python benchmarks/async.py [--rollouts 20] [--seeds 0 1 2] [--out FILE]

Three commands train a random model on a task whose responses have heavy-tailed lengths (`length_law.py`): `instep
train`, `instep train-async` (one step ahead) and `instep train-async --max-staleness 2`, each from the same weights,
with the same prompts and lengths; nothing sleeps. The engine has one core, trainer and controller the other. Samples a
second are those of all rollouts but the first three, by the clock between the rows of metrics.jsonl; the reward is that
of held-out prompts under the last weights. The bound is what a synchronous step would gain if its rollout and its
training went on at once: its seconds over the longer one of the two. With --max-staleness responses go on through each
sync, and their tokens are computed again under the new weights: on a CPU that is dear, on a GPU it is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from instep.observability.versions import versions

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from length_law import LONGEST, MEDIAN, SHORTEST, SIGMA, VOCABULARY, length  # noqa: E402
from machine import cores  # noqa: E402
from random_model import prompt  # noqa: E402

PROMPTS, GROUP, PROMPT_LENGTH, HELD_OUT = 16, 8, 16, 64
SKIPPED = 3  # first rollouts of a run, in which queues fill and processes warm up
MODEL: dict[str, Any] = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4)
MODEL |= dict(num_key_value_heads=2, head_dim=64, vocab_size=VOCABULARY, tie_word_embeddings=True)
MODES = {
    "synchronous": ("train",),
    "one step ahead": ("train-async",),
    "2 versions": ("train-async", "--max-staleness", "2"),
}
FLAGS = f"--input-key prompt --n-samples-per-prompt {GROUP} --rollout-batch-size {PROMPTS} --rollout-shuffle "
FLAGS += f"--rollout-max-response-len {LONGEST} --custom-generate-function-path length_law.generate "
FLAGS += "--custom-rm-path length_law.reward --train-backend hf --device cpu --actor-num-gpus-per-node 1 "
FLAGS += "--rollout-backend embedded --rollout-num-gpus 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192 "
FLAGS += "--lr 1e-3 --lr-decay-style constant --weight-decay 0 --clip-grad 1 --num-threads 1 --use-tis"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "async-cpu.json")
    given = parser.parse_args()
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        sys.exit("engine and trainer want a core each; one is usable here")
    rows = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="instep-bench-") as folder:
            make_inputs(Path(folder), seed, given.rollouts)
            for mode in MODES:
                rows.append({"mode": mode, "seed": seed, **measure(Path(folder), mode, seed, given.rollouts, here[:2])})
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    result = report(given, rows)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def make_inputs(folder: Path, seed: int, rollouts: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(max_position_embeddings=2048, eos_token_id=1, pad_token_id=0, **MODEL)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w2")
    tokenizer.save_pretrained(folder / "model")
    for name, number in (("train", rollouts * PROMPTS), ("held-out", HELD_OUT)):
        seeds = range(1_000_000 * (seed + 1), 1_000_000 * (seed + 1) + number) if name == "train" else range(number)
        texts = (prompt(PROMPT_LENGTH, VOCABULARY, i) for i in seeds)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def measure(folder: Path, mode: str, seed: int, rollouts: int, two: list[int]) -> dict[str, Any]:
    """Run one command; returns its samples a second, seconds by phase, and held-out reward."""
    out = folder / mode.replace(" ", "-")
    command, *more = MODES[mode]
    words = [sys.executable, "-m", "instep.cli", command, "--hf-checkpoint", folder / "model", *FLAGS.split(), *more]
    words += ["--prompt-data", folder / "train.jsonl", "--eval-prompt-data", "held-out", folder / "held-out.jsonl"]
    words += ["--eval-interval", rollouts, "--skip-eval-before-train", "--num-rollout", rollouts, "--run-dir", out]
    words += ["--seed", seed, "--rollout-seed", seed]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    with (folder / "output.txt").open("w+") as output:
        run = subprocess.Popen([str(w) for w in words], env=environment, stdout=output, stderr=output)
        ended = threading.Event()
        pinning = threading.Thread(target=pin, args=(run.pid, two, ended))
        pinning.start()
        try:
            code = run.wait(timeout=1800)
        finally:
            run.terminate()  # without effect on one that has ended
            ended.set()
            pinning.join()
        if code:
            output.seek(0)
            sys.exit(f"{' '.join(map(str, words))}\n{output.read()[-4000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == rollouts
    seconds = steps[-1]["time"] - steps[SKIPPED - 1]["time"]
    counted = steps[SKIPPED:]
    found = {
        "samples_per_s": len(counted) * PROMPTS * GROUP / seconds,
        "held_out_reward": next(row["eval/held-out/reward_mean"] for row in rows if "eval/held-out/reward_mean" in row),
        "staleness_mean": mean(row.get("async/staleness_mean", 0.0) for row in counted),
        "effective_sample_ratio": min(row["train/effective_sample_ratio"] for row in counted),
        "groups_dropped": sum(row.get("rollout/num_groups_stale", 0) for row in steps),
    }
    for phase in ("rollout", "wait", "train", "sync"):
        found[f"{phase}_s"] = mean(row.get(f"perf/{phase}_seconds", 0.0) for row in counted)
    for side in ("trainer", "engine"):
        found[f"{side}_idle_ratio"] = mean(row[f"perf/{side}_idle_ratio"] for row in counted)
    return found


def pin(pid: int, two: list[int], ended: threading.Event) -> None:
    """Keep engine processes on the first core, all others of the run on the second."""
    while not ended.wait(0.2):
        try:
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for process in processes:
                wanted = [two["instep.engines.embedded" not in process.cmdline()]]
                if process.cpu_affinity() != wanted:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, wanted)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
            continue


def report(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    def of(mode: str, name: str) -> list[float]:
        return [row[name] for row in rows if row["mode"] == mode]

    slow, ahead, groups = MODES

    def ratio(mode: str) -> float:
        pairs = zip(of(mode, "samples_per_s"), of(slow, "samples_per_s"), strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    phases = zip(of(slow, "rollout_s"), of(slow, "train_s"), of(slow, "sync_s"), strict=True)
    bound = median((rollout + train + sync) / max(rollout, train + sync) for rollout, train, sync in phases)
    rewards = {mode: mean(of(mode, "held_out_reward")) for mode in MODES}
    return {
        "benchmark": "async",
        "device": cores(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "workload": {
            "rollouts": given.rollouts,
            "skipped": SKIPPED,
            "prompts": PROMPTS,
            "samples_per_prompt": GROUP,
            "length_law": f"log-normal, median {MEDIAN}, sigma {SIGMA}, cut at {SHORTEST} and {LONGEST}",
            "mean_length": mean(length(f"p{i}", i) for i in range(10000)),
            "model": MODEL,
            "flags": FLAGS,
        },
        "rows": rows,
        "headline": {
            "samples_ratio": ratio(ahead),
            "bound": bound,
            "share_of_bound": ratio(ahead) / bound,
            "samples_ratio_2_versions": ratio(groups),
            "reward_difference": min(rewards[ahead], rewards[groups]) - rewards[slow],
        },
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title="asynchronous training, median of the seeds")
    columns = ["samples_per_s", "rollout_s", "wait_s", "train_s", "sync_s", "trainer_idle_ratio", "engine_idle_ratio"]
    columns += ["staleness_mean", "held_out_reward"]
    for name in ("mode", *columns):
        table.add_column(name)
    for mode in MODES:
        mine = [row for row in result["rows"] if row["mode"] == mode]
        table.add_row(mode, *(f"{median(row[name] for row in mine):.3f}" for name in columns))
    Console().print(table)
    print(json.dumps(result["headline"]))


if __name__ == "__main__":
    main()

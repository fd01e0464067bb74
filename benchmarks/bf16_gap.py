"""Do synced weights serve as well as weights loaded from disk, in bf16, where trainer and engine round differently?

    python benchmarks/bf16_gap.py [--device cpu|cuda] [--quickstart DIR] [--out FILE]

A run trains for a few steps in bf16 on vLLM; every step ends with a sync through shared memory. Then the engine
generates once more, and the trainer's weights are exported and loaded from disk by an engine that starts anew, which
generates from the same prompts and seeds. The gap is |log-prob of the trainer - log-prob of the engine|, the mean over
the generated tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where the reward is found by name, too

from benchmarks.machine import cores  # noqa: E402
from instep.arguments.parse import parse  # noqa: E402
from instep.cluster.engine_plan import plan_engines  # noqa: E402
from instep.cluster.engine_start import start_engine  # noqa: E402
from instep.controller.controller import Controller  # noqa: E402
from instep.controller.role import RoleTrainer  # noqa: E402
from instep.engines.engine import Engine  # noqa: E402
from instep.engines.wire import GENERATE, Completion  # noqa: E402
from instep.observability.versions import versions  # noqa: E402
from instep.rollout.client import complete  # noqa: E402
from instep.types import Sample, TokenBatch  # noqa: E402

LIMIT = 1.2  # of the ratio of the two mean gaps
FLAGS = "--input-key prompt --label-key label --apply-chat-template --train-backend hf --precision bf16 "
FLAGS += "--rollout-backend vllm --actor-num-gpus-per-node 1 --rollout-batch-size 16 --n-samples-per-prompt 8 "
FLAGS += "--rollout-max-response-len 64 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 5e-4 "
FLAGS += "--lr-decay-style constant --weight-decay 0 --seed 0 --custom-rm-path benchmarks.bf16_gap.reward"
ON_A_GPU = "--colocate --vllm-gpu-memory-utilization 0.1 --vllm-kv-cache-memory-bytes 536870912"


async def reward(args: Any, sample: Sample) -> float:
    """Dense, so that any model has something to learn: the share of digits."""
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quickstart",
        type=Path,
        help="folder of a quickstart whose SFT model is trained; default: one with random weights, made here",
    )
    parser.add_argument("--num-steps", type=int, default=8, help="each ends with a sync")
    parser.add_argument("--run-dir", type=Path, help="default: a folder that is removed afterwards")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/bf16-gap-<device>.json")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here (make install-vllm)")
        return
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        result = measure(options, Path(scratch))
    out = options.out or ROOT / "benchmarks" / "results" / f"bf16-gap-{options.device}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["headline"]))
    sys.exit(result["headline"]["gap_ratio"] > LIMIT)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if options.quickstart is None:
        script, task = ROOT / "examples" / "quickstart" / "make_task.py", scratch / "task"
        subprocess.run([sys.executable, str(script), "--out", str(task), "--seed", "0"], check=True, timeout=300)
        model = task / "hf"
    else:
        task, model = options.quickstart / "task", options.quickstart / "sft" / "hf"
    words = ["--hf-checkpoint", str(model), "--prompt-data", str(task / "train.jsonl"), "--device", options.device]
    words += FLAGS.split()
    words += ["--num-rollout", str(options.num_steps + 1), "--run-dir", str(options.run_dir or scratch / "run")]
    words += ON_A_GPU.split() if options.device == "cuda" else []
    args = parse(words, "train")
    with Controller(args, title="bf16 gap") as controller:
        controller.sync_weights()
        rows = []
        for step in range(options.num_steps):
            rollout = controller.generate(step)
            gap = gaps_of(controller, [s for group in rollout.groups for s in group])
            rows.append({"gap": float(gap.abs().mean())})
            trained = controller.train(rollout)
            controller.sync_weights()
            controller.finish_step(rollout, trained)
        synced = [s for group in controller.generate(options.num_steps).groups for s in group]
        trainer_of(controller).export_hf(scratch / "exported")
        with fresh_engine(controller.args, scratch) as fresh:
            loaded = asyncio.run(generate_again(fresh, scratch / "exported", synced))
            between = largest_difference(controller, fresh, synced)
        assert controller.totals.last_sync is not None
        last = controller.totals.last_sync
        version, probe = last.version, last.proven.last.largest
        differences = gaps_of(controller, synced)
        clipped = clipped_by_gspo(differences, synced)
        loaded_gap = float(gaps_of(controller, loaded).abs().mean())
        gaps = {"synced": float(differences.abs().mean()), "loaded": loaded_gap}
    return {
        "benchmark": "bf16-gap",
        "device": (versions()["gpu"] or [""])[0] if options.device == "cuda" else cores(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "workload": {
            "flags": FLAGS,
            "steps": options.num_steps,
            "model": "the quickstart's, " + ("after SFT" if options.quickstart else "random weights"),
        },
        "rows": rows,
        "headline": {
            "gap_mean_after_syncs": gaps["synced"],
            "gap_mean_loaded_from_disk": gaps["loaded"],
            "gap_ratio": gaps["synced"] / gaps["loaded"],
            "engines_max_abs_diff": between,
            "same_responses": sum(a.tokens == b.tokens for a, b in zip(synced, loaded, strict=True)) / len(synced),
            "outside_the_bounds_of_gspo": clipped,
            "num_syncs": version,
            "num_tokens": sum(s.response_length for s in synced),
            "sync_probe_max_abs_diff": probe,
        },
    }


def gaps_of(controller: Controller, samples: list[Sample]) -> torch.Tensor:
    """Return trainer - engine of the log-probs of all response tokens."""
    batch = TokenBatch(
        tokens=torch.tensor([t for s in samples for t in s.tokens]),
        total_lengths=torch.tensor([len(s.tokens) for s in samples]),
        response_lengths=torch.tensor([s.response_length for s in samples]),
        sample_columns={"temperature": torch.ones(len(samples))},
    )
    ours = torch.tensor(trainer_of(controller).probe_log_probs(batch, timeout=300)[0])
    engine = torch.tensor([x for s in samples for x in s.rollout_log_probs or ()])
    return ours - engine


def clipped_by_gspo(differences: torch.Tensor, samples: list[Sample]) -> float:
    """Return the share of responses whose ratio to the engine's own log-probs lies outside GSPO's default bounds.

    The weights are the same, so that rounding alone makes the ratio; a clip acts on one side of it, by the advantage.
    """
    means = torch.stack([part.mean() for part in differences.split([s.response_length for s in samples])])
    return float(((means.exp() < 1 - 3e-4) | (means.exp() > 1 + 4e-4)).float().mean())


def trainer_of(controller: Controller) -> RoleTrainer:
    assert controller.deployment.trainer is not None
    return controller.deployment.trainer.actor


@contextlib.contextmanager
def fresh_engine(args: Any, scratch: Path) -> Iterator[Engine]:
    """Start an engine that serves `scratch/exported`, on the devices of the first one."""
    own = args.replace(hf_checkpoint=str(scratch / "exported"))
    spec = dataclasses.replace(plan_engines(own)[0], index=1)
    engine = start_engine(own, spec, num_threads=args.num_threads, log_dir=Path(args.run_dir) / "logs")
    try:
        engine.wait_ready(args.engine_start_timeout)
        yield engine
    finally:
        engine.stop()


async def generate_again(engine: Engine, model: Path, samples: list[Sample]) -> list[Sample]:
    """Generate responses to the same prompts, with the same seeds."""

    async def one(sample: Sample) -> Completion:
        prompt = sample.tokens[: -sample.response_length]
        return await complete(engine.url + GENERATE, str(model), prompt, sample.sampling_params, timeout=300)

    out = []
    for sample, done in zip(samples, await asyncio.gather(*map(one, samples)), strict=True):
        tokens = sample.tokens[: -sample.response_length] + done.token_ids
        again = Sample(tokens=tokens, response_length=len(done.token_ids), rollout_log_probs=done.log_probs)
        out.append(again)
    return out


def largest_difference(controller: Controller, fresh: Engine, samples: list[Sample]) -> float:
    """Return the largest difference of the two engines' log-probs of the same tokens, as prompts."""
    largest = 0.0
    for sample in samples[:: len(samples) // 16]:
        body = {"token_ids": sample.tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
        scores = []
        for engine in (controller.deployment.engines[0], fresh):
            entries = engine.post(GENERATE, body, timeout=60)["prompt_logprobs"][1:]
            scores.append([e[str(t)]["logprob"] for e, t in zip(entries, sample.tokens[1:], strict=True)])
        largest = max(largest, *(abs(a - b) for a, b in zip(*scores, strict=True)))
    return largest


if __name__ == "__main__":
    main()

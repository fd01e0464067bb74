"""The controller's own share of a step: what it costs when engines and trainer cost nothing.

    python benchmarks/controller_share.py [--samples 256 8192] [--lengths uniform mixed] [--json] [--out FILE]
    python benchmarks/controller_share.py --tokens-per-second 400000 --samples 8192 --out FILE

A real controller runs steps of GRPO: 8 samples a prompt, math reward, one optimizer step. Prompt and response have
128 + 512 tokens (`uniform`), or any number of 64 to 256 + 32 to 512 (`mixed`). The engine is a process that answers at
once over HTTP (in arrays, as vLLM with instep's plugin does; with `--json` as any vLLM), the trainer one that takes the
batch and answers at once (`stand_ins.py`). Nothing is synced. Seconds are CPU seconds of the controller's process, all
its threads; a part's are those of the thread that it ran in, without other parts within. The first step, which opens
connections and imports, does not count; from the second on the lengths of responses are known. No prompt comes twice.
Clocks for the parts cost a tenth more, so only every second step has them; "cpu" and "wall" are of the others, and "all
else" is what the parts leave of that.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import instep.controller.controller as controlling
from instep.arguments.parse import parse
from instep.cluster.local import CONNECTION_VARIABLE, WorkerGroup
from instep.controller import records
from instep.controller import round as rounds
from instep.controller.role import RoleTrainer
from instep.controller.turns import Turns
from instep.data.tokenizer import ByteTexts
from instep.engines import keys, wire
from instep.rollout import execute, group_request, http
from instep.rollout.request_gate import gate
from instep.rollout.rewards import text
from instep.system import fork_server
from instep.system.processes import OPENMP_ENV, SupervisedProcess
from instep.training import lr_schedule
from instep.training.backend import ParallelInfo
from instep.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
from machine import cores  # noqa: E402

HERE = Path(__file__).parent
GROUP, LONGEST = 8, 512
# Tokens of prompts and responses, each from the first to the second with equal probability.
LENGTHS = {"uniform": ((128, 128), (512, 512)), "mixed": ((64, 256), (32, 512))}
STEPS = 7  # the first does not count; of the others every second one has clocks for the parts
# The parts of a step, and the functions that do them.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "prompts from the data source": [(controlling.LedgeredDataSource, "get_samples")],
    "answers read": [(http, "_parse"), (wire, "_completion")],
    "samples built and checked": [
        (Sample, "append_plain"),
        (execute, "settle"),
        (execute, "check_sample"),
        (group_request, "check_sample"),
    ],
    "prompts to tokens": [(group_request, "prompt_ids"), (execute, "prompt_ids")],
    "detokenization": [(ByteTexts, "decode"), (transformers.PreTrainedTokenizerFast, "decode")],
    "rewards": [(text, "last_boxed"), (text, "quick_equal")],
    "groups checked": [(controlling, "as_train_output")],
    "metrics": [(controlling, "metrics_of_rollout"), (controlling, "training_metrics"), (controlling, "speed_metrics")],
    "batch": [(rounds, "build_batch")],
    "columns": [(rounds, n) for n in ("fresh_tokens", "older_tokens", "loss_weights", "loss_scales", "add_advantages")],
    "schedule and shares": [(RoleTrainer, "plan"), (RoleTrainer, "_shares"), (rounds, "steps_of_samples")],
    "batch handed to the trainer": [(WorkerGroup, "start")],
    "samples.jsonl": [(records.Records, name) for name in ("wanted", "trained", "generated")],
    "metrics.jsonl, TensorBoard, display": [(controlling.RunLogger, "log")],
    "ledger": [(controlling.LedgeredDataSource, "finish_rollout"), (controlling.Ledger, "consume")],
    "run state": [(controlling, "data_state")],
}
REST, BEYOND = "requests, tasks and all else", "beyond the engine"


class Spans:
    """CPU seconds by part, each without the parts within it; functions are wrapped once for the whole process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on = False
        self._lock, self._inner = threading.Lock(), threading.local()
        for part, functions in PARTS.items():
            for owner, name in functions:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            outer, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.thread_time() - began
                with self._lock:
                    self.seconds[part] += seconds - self._inner.seconds
                self._inner.seconds = outer + seconds

        return timed

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class StandInWorkers(WorkerGroup):
    """One rank, which answers at once."""

    def __init__(self, log_dir: Path):
        import socket
        from multiprocessing.connection import Connection

        super().__init__("actor", 0, log_dir)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "stand_ins", "worker"]  # may be forked, as a trainer's worker is
        fd = theirs.fileno()
        env = {CONNECTION_VARIABLE: str(fd), "PYTHONPATH": str(HERE), **OPENMP_ENV}
        self.processes.append(SupervisedProcess("worker", command, log_dir / "worker.log", env, [fd]))
        theirs.close()
        self._connections.append(Connection(ours.detach()))
        self._inbox.read(0, self._connections[0])


class StandInDeployment:
    """What the controller asks of its processes, with stand-ins for them."""

    version = trained_version = 1
    gap_limit = float("inf")
    engines: list[Any] = []  # none to look after
    processes: list[Any] = []
    worker_groups: list[Any] = []
    url = ""

    def __init__(self, args: Any, hook_args: Any, runtime: Any, *_: Any, **__: Any):
        self._args, self._runtime, self.turns = args, runtime, Turns(args)

    def start(self) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        keys.know(self.url, "key", user=os.geteuid())
        self._runtime.update(
            vllm_router_ip=host, vllm_router_port=int(port), vllm_model_routers={}, rollout_engine_urls=[self.url],
            rollout_engine_kind="vllm", vllm_model_engine_urls={}, num_rollout=STEPS,
        )  # fmt: skip
        gate().guarded = self.url
        gate().open("1")
        self._workers = StandInWorkers(Path(self._args.run_dir) / "logs")
        schedule = lr_schedule.from_args(self._args, STEPS)
        self.actor = RoleTrainer(self._args, self._workers, [ParallelInfo(0, 1, 0, 1)], schedule)
        self.critic, self.trainer = None, self

    def sync_weights(self) -> None:
        return None

    def stepped(self) -> None:
        return None

    def offer(self, groups: Any) -> None:
        """No sync has a probe."""

    def hold_engines(self) -> None:
        return None

    def check_and_rejoin(self) -> None:
        return None

    def memory(self, phase: str) -> dict[str, float]:
        return {}

    def accepted_drafts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._workers.close()


def make_task(folder: Path, num_prompts: int, lengths: str) -> dict[str, Path]:
    """Write a tokenizer, a checkpoint without weights, prompts with labels, and answers, a quarter of them right."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted((HERE.parent / "docs").glob("*.md"))
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    words = tokenizer.encode("\n".join(path.read_text() for path in texts), add_special_tokens=False).ids
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = Qwen3Config(vocab_size=8192, architectures=["Qwen3ForCausalLM"], max_position_embeddings=4096)
    config.save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    rng = random.Random(0)

    def text_of(length: int) -> list[int]:
        start = rng.randrange(len(words) - length)
        return words[start : start + length]

    of_prompts, of_responses = LENGTHS[lengths]
    data = folder / "train.jsonl"
    with data.open("w") as out:
        for _ in range(num_prompts):
            out.write(json.dumps({"prompt": tokenizer.decode(text_of(rng.randint(*of_prompts))), "label": "42"}) + "\n")
    answers = []
    for number in (42, 7, 13, 8) * 16:
        end = tokenizer.encode(f" so it is \\boxed{{{number}}}.", add_special_tokens=False).ids
        answers.append(text_of(rng.randint(*of_responses) - len(end)) + end)
    (folder / "answers.json").write_text(json.dumps(answers))
    return {"hf": folder, "data": data, "answers": folder / "answers.json"}


def measure(
    task: dict[str, Path], num_samples: int, spans: Spans, more: list[str], folder: Path, rate: float | None
) -> dict[str, Any]:
    """The row of `num_samples` samples a step: medians over its steps."""
    command = [sys.executable, str(HERE / "stand_ins.py"), "engine", str(task["answers"])]
    command += [str(rate)] if rate else []
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    steps, parts = [], []
    try:
        assert engine.stdout is not None
        StandInDeployment.url = f"http://127.0.0.1:{int(engine.stdout.readline())}"
        words = [
            *("--hf-checkpoint", task["hf"], "--prompt-data", task["data"], "--input-key", "prompt", "--label-key"),
            *("label", "--rm-type", "math", "--rollout-batch-size", num_samples // GROUP, "--n-samples-per-prompt"),
            *(GROUP, "--rollout-max-response-len", LONGEST, "--num-rollout", STEPS, "--train-backend", "hf"),
            *("--rollout-backend", "vllm", "--actor-num-gpus-per-node", 1, "--device", "cpu", "--run-dir"),
            *(folder / f"run-{num_samples}", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 32768, *more),
        ]
        args = parse([str(word) for word in words], "train")
        with controlling.Controller(args, title="share") as controller:
            for rollout_id in range(STEPS):
                spans.on = rollout_id > 0 and rollout_id % 2 == 0
                wall, cpu = time.perf_counter(), time.process_time()
                rollout = controller.generate(rollout_id)
                generated = time.perf_counter()
                trained = controller.train(rollout)
                controller.finish_step(rollout, trained)
                controlling.data_state(controller.data_source, rollout_id)
                seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
                if rate:
                    seconds[BEYOND] = seconds["wall"] - rollout.num_response_tokens / rate
                if spans.on:
                    parts.append(spans.take())
                elif rollout_id:
                    steps.append({**seconds, "generate wall": generated - wall})
    finally:
        engine.kill()
        engine.wait()
    row = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    row |= {name: statistics.median(part.get(name, 0.0) for part in parts) for name in PARTS}
    row[REST] = row["cpu"] - sum(row[name] for name in PARTS)
    return {"samples": num_samples, "seconds": row, "steps": steps, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 8192])
    parser.add_argument("--tokens-per-second", type=float, help="of the engine; default: it answers at once")
    parser.add_argument("--json", action="store_true", help="answers in vLLM's JSON")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "controller-share-cpu.json")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    given = parser.parse_args()
    more = ["--no-fast-log-probs"] if given.json else []
    spans, controlling.Deployment = Spans(), StandInDeployment  # type: ignore[misc, assignment]
    with tempfile.TemporaryDirectory() as folder, fork_server.beside():
        if fork_server.current is not None:
            fork_server.current.preload((), {**os.environ, **OPENMP_ENV})
        rows = []
        for lengths in given.lengths:
            task = make_task(Path(folder) / lengths, STEPS * max(given.samples) // GROUP, lengths)
            rate = given.tokens_per_second
            rows += [{"lengths": lengths, **measure(task, n, spans, more, task["hf"], rate)} for n in given.samples]
    for name in rows[0]["seconds"]:
        print(f"{name:40}" + "".join(f"{row['seconds'][name]:10.3f}" for row in rows))
    headline = {f"cpu_seconds_{row['lengths']}_{row['samples']}": row["seconds"]["cpu"] for row in rows}
    if given.tokens_per_second:
        headline |= {f"beyond_{row['lengths']}_{row['samples']}": row["seconds"][BEYOND] for row in rows}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result = {
        "benchmark": "controller_share",
        "device": cores(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "workload": {
            "lengths": {name: LENGTHS[name] for name in given.lengths},
            "group": GROUP,
            "answers": "json" if given.json else "arrays",
            "tokens_per_second": given.tokens_per_second,
        },
        "rows": rows,
        "headline": headline,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One way of the weights, started and measured: a process of `weight_sync_gpu.py`, which gives it its order as JSON."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from instep.arguments.parse import parse
from instep.controller.controller import Controller
from instep.controller.role import RoleTrainer
from instep.engines.engine import Engine
from instep.errors import InstepError
from instep.rollout import runtime
from instep.rollout.client import complete

FLAGS = "--input-key prompt --rm-type random --train-backend hf --rollout-backend vllm --num-rollout 1 "
FLAGS += "--actor-num-gpus-per-node 1 --rollout-batch-size 1 --n-samples-per-prompt 8 --vllm-max-model-len 512 "
FLAGS += "--vllm-max-num-seqs 72 --pause-mode keep "
ON_GPU = "--device cuda --precision bf16 --vllm-gpu-memory-utilization 0.08 --vllm-kv-cache-memory-bytes 5368709120 "
ON_CPU = "--device cpu --precision bf16 --rollout-num-gpus 1 --update-weight-buffer-size 100000 "
ON_A_GPU = "cuda" in sys.argv[-1]
REQUESTS, PROMPT, RESPONSE = (64, 128, 256) if ON_A_GPU else (4, 16, 16)
IDLE_SYNCS = 6
RELOAD_EVERY = 5
PARTS = {  # the calls whose seconds are told apart
    Engine: ("pause", "start_update", "update", "finish_update", "reset_cache", "resume", "prompt_log_probs"),
    RoleTrainer: ("publish", "probe_log_probs"),
}


class Stamps:
    """When each call of PARTS began and ended, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, float]] = []
        for owner, names in PARTS.items():
            for name in names:
                if (call := getattr(owner, name, None)) is not None:
                    setattr(owner, name, self._timed(name, call))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*words: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*words, **more)
            finally:
                self.calls.append((name, began, time.monotonic()))

        return timed

    def seconds(self) -> dict[str, float]:
        """The seconds of the last session by part, from the first call of a name to the end of its last one."""
        found: dict[str, tuple[float, float]] = {}
        for name, began, ended in self.calls:
            first, last = found.get(name, (began, ended))
            found[name] = (min(first, began), max(last, ended))
        out = {name: ended - began for name, (began, ended) in found.items()}
        if {"pause", "resume"} <= found.keys():
            begun = found["pause"][0]
            received = sum(ended - began for name, began, ended in self.calls if name == "update" and began < begun)
            out["paused"] = found["resume"][1] - begun + received  # between two steps, where an adapter came
        probes = [found[name] for name in ("prompt_log_probs", "probe_log_probs") if name in found]
        if probes:
            out["proof"] = max(ended for _, ended in probes) - min(began for began, _ in probes)
        return out


def main() -> None:
    order = json.loads(sys.argv[1])
    models, size = Path(order["models"]), order["size"]
    words = f"{FLAGS}{ON_GPU if order['device'] == 'cuda' else ON_CPU} --prompt-data {models}/train.jsonl "
    words += f"--hf-checkpoint {models}/{size}-0 --run-dir {order['run_dir']} "
    flags = order["flags"] if order["device"] == "cuda" else order["flags"].replace("--colocate", "")
    stamps = Stamps()
    try:
        with Controller(parse([*words.split(), *flags.split()], "train"), title="weight sync") as controller:
            base = throughput(controller.deployment.engines[0], controller.args.hf_checkpoint)
            sync(controller, stamps, None)
            print(json.dumps({"ready": True}), flush=True)
            assert (syncs := controller.deployment._sync) is not None
            chosen = {controller.args.weight_sync: syncs.way}
            for way in map(str.strip, sys.stdin):
                syncs.way = chosen.get(way, way)
                print(json.dumps(measure(controller, stamps, order) | {"tokens_per_s_before": base}), flush=True)
    except InstepError as error:
        print(json.dumps({"error": str(error).splitlines()[0][:400]}), flush=True)


def sync(controller: Controller, stamps: Stamps, load: Path | None) -> dict[str, float]:
    """One sync; returns its seconds by part, and the metrics of the sync."""
    deployment = controller.deployment
    assert deployment.trainer is not None
    deployment.hold_engines()  # single-copy: nothing else is paused before a session
    if load is not None:
        deployment.trainer.actor.load_weights(load)
    stamps.calls.clear()
    began = time.monotonic()
    controller.sync_weights()
    found = {"session": time.monotonic() - began, **stamps.seconds()}
    assert controller.totals.last_sync is not None
    return found | {n.partition("/")[2]: v for n, v in controller.totals.last_sync.metrics().items()}


def measure(controller: Controller, stamps: Stamps, order: dict[str, Any]) -> dict[str, Any]:
    engine, model = controller.deployment.engines[0], controller.args.hf_checkpoint
    others = [Path(order["models"]) / f"{order['size']}-{seed}" for seed in (1, 0)]
    if "lora" in order["flags"] or not others[0].exists():
        others = []  # the base of an adapter stays
    rests = [None] * (RELOAD_EVERY - 1)
    loads = itertools.cycle([*rests, *others[:1], *rests, *others[1:]])
    if "single-copy" in order["flags"]:  # writes nothing unless the masters have changed, or were loaded anew
        loads = itertools.cycle(others or [Path(model)])
    assert controller.deployment.trainer is not None
    trainer = controller.deployment.trainer.actor
    trainer.memory()  # the peak counts from here
    deadline = time.monotonic() + order["seconds"]
    busy: list[dict[str, float]] = []
    waits: list[float] = []
    idle = [sync(controller, stamps, next(loads)) for _ in range(IDLE_SYNCS)]
    alone = median(answer_seconds(engine, model) for _ in range(3))
    with requests_in_flight(engine, model) as answered:
        time.sleep(0.3)
        first = sync(controller, stamps, next(loads))  # does not count
        while len(busy) < order["num_syncs"] and (time.monotonic() < deadline or len(busy) < 5):
            time.sleep(0.3)  # all are under way
            busy.append(sync(controller, stamps, next(loads)))
            waits.append(answer_seconds(engine, model) - alone)
    memory = trainer.memory()
    medians = medians_of(busy)
    found = {
        "num_syncs": len(busy),
        "paused_p50": medians.get("paused"),
        "paused_p95": quantiles([row["paused"] for row in busy], n=20)[-1] if "paused" in medians else None,
        "recomputed": median(waits),  # what a new request waits for after a sync, where those in flight are recomputed
        "answered": len(answered),
        "trainer_peak_gb": memory.get("trainer_peak_bytes", 0.0) / 1e9,
        "tokens_per_s": throughput(engine, model),
    }
    raw = {"first": first, "busy": busy, "idle": idle, "waits": waits}
    return found | {"busy": medians, "idle": medians_of(idle), "raw": raw}


def medians_of(syncs: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sync in syncs for name in sync)
    return {name: median(sync[name] for sync in syncs if name in sync) for name in names}


def answer_seconds(engine: Engine, model: str) -> float:
    began = time.monotonic()
    generate(engine, model, 1, seed=0)
    return time.monotonic() - began


def generate(engine: Engine, model: str, length: int, seed: int) -> None:
    rng = random.Random(seed)
    params = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "seed": seed}
    body = {"token_ids": [rng.randrange(3, 500) for _ in range(PROMPT)], "sampling_params": params}
    engine.post(engine.kind.wire.generate_route, {**body, "model": model}, timeout=120)


def throughput(engine: Engine, model: str) -> float:
    """Tokens per second of REQUESTS responses at once, asked for as a rollout does; the second of two such loads."""
    url, seconds = engine.url + engine.kind.wire.generate_route, 0.0

    async def everyone(seed: int) -> None:
        rng = random.Random(seed)
        params = {"max_tokens": RESPONSE, "temperature": 1.0, "ignore_eos": True}
        prompts = [[rng.randrange(3, 500) for _ in range(PROMPT)] for _ in range(REQUESTS)]
        await asyncio.gather(*(complete(url, model, prompt, params) for prompt in prompts))

    for seed in range(2):
        began = time.monotonic()
        runtime.run(everyone(seed), timeout=120)
        seconds = time.monotonic() - began
    return REQUESTS * RESPONSE / seconds


@contextmanager
def requests_in_flight(engine: Engine, model: str) -> Iterator[list[int]]:
    """Keep REQUESTS requests under way; yields the numbers of those that were answered."""
    stopped, answered, numbers = threading.Event(), list[int](), itertools.count(10**6)

    def ask() -> None:
        while not stopped.is_set():
            number = next(numbers)
            with suppress(InstepError):
                generate(engine, model, RESPONSE, seed=number)
                answered.append(number)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(REQUESTS)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stopped.set()
        for thread in threads:
            thread.join(60)


if __name__ == "__main__":
    main()

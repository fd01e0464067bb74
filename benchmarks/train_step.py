"""How fast is the forward, backward and optimizer step of a GRPO update, and how far from the card's peak?

    python benchmarks/train_step.py [--size 0.6b 4b] [--device cuda] [--out FILE] [--case "hf --no-torch-compile" ...]

Random Qwen3 weights (of sizes with `a3b` or `moe` in their names Qwen3-MoE's), `--num-samples` samples of `--prompt` +
`--response` tokens, through the worker of a run; the old log-probs are given, so that a step is what a round's training
costs. A case is a train backend and its flags; `remark` is what the backend says, for example why it pads. FLOPs are 6
for each parameter of the layers and token, of experts those that a token takes, 6 for each parameter of the head and
token of a response (no other token's logits are made), and those of causal attention; embeddings and recomputation do
not count.

With --turns the trainer leaves the GPU after each step as it does for a colocated engine: all but the weights
(`leave_s`), then the weights (`leave_weights_s`); and it comes back (`return_s`; the optimizer's states arrive while
the next step computes). With --kernels N one more step is recorded, and the row has the N kernels that took most of it:
how often, and how many milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.machine import cores  # noqa: E402
from benchmarks.random_model import SIZES, make_model  # noqa: E402
from instep.arguments.parse import parse  # noqa: E402
from instep.cluster.local import WorkerGroup  # noqa: E402
from instep.controller.device import resolve_on_machine  # noqa: E402
from instep.controller.role import RoleTrainer  # noqa: E402
from instep.errors import InstepError  # noqa: E402
from instep.observability.floors import Model  # noqa: E402
from instep.observability.versions import versions  # noqa: E402
from instep.preflight.plan.memory import allocated  # noqa: E402
from instep.system.processes import num_usable_cpus  # noqa: E402
from instep.system.spans import ON_GPU  # noqa: E402
from instep.training import lr_schedule  # noqa: E402
from instep.types import TokenBatch  # noqa: E402

PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # dense bf16 FLOP/s
CASES = ["hf", "hf --recompute-granularity full", "megatron"]
FLAGS = "--input-key prompt --rm-type random --rollout-backend vllm --num-rollout 1 --actor-num-gpus-per-node 1 "
FLAGS += "--rollout-batch-size 32 --n-samples-per-prompt 8 --use-dynamic-batch-size --colocate"
MOVES: dict[str, Callable[[RoleTrainer], Callable[[], None]]] = {
    "leave_s": lambda actor: actor.offload(weights=False),
    "leave_weights_s": lambda actor: actor.offload(weights=True),
    "return_s": lambda actor: actor.onload(optimizer=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["0.6b"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs="+", default=CASES, help="train backend, and flags of a run")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=32768)
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--steps", type=int, default=4, help="the first does not count")
    parser.add_argument("--turns", action="store_true", help="leave the GPU after each step, and come back")
    parser.add_argument("--kernels", type=int, default=0, help="the longest kernels of a further step")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        for size in options.size:
            model = make_model(Path(scratch) / size, size, device=options.device)
            (model / "train.jsonl").write_text('{"prompt": "1"}\n')
            for case in options.case:
                row: dict[str, Any] = {"size": size, "case": case}
                try:
                    row |= measure(options, model, case, Path(scratch) / f"{size}-{len(rows)}")
                except InstepError as error:
                    row["error"] = str(error).splitlines()[0]
                rows.append(row)
                print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else cores()
    result = {"benchmark": "train_step", "device": device, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    workload = {k: getattr(options, k) for k in ("num_samples", "prompt", "response", "max_tokens_per_gpu")}
    if options.out:
        options.out.write_text(json.dumps(result | {"workload": workload, "rows": rows}, indent=1) + "\n")


def batch_of(options: argparse.Namespace, vocab: int, step: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(step)
    n, length = options.num_samples, options.prompt + options.response
    num_response = n * options.response
    columns = {name: torch.randn(num_response, generator=generator) for name in ("advantages",)}
    columns["loss_mask"] = torch.ones(num_response)
    columns["loss_weights"] = torch.full((num_response,), 1.0 / num_response)
    columns["rollout_log_probs"] = torch.full((num_response,), -6.0)
    return TokenBatch(
        torch.randint(3, vocab, (n * length,), generator=generator),
        torch.full((n,), length),
        torch.full((n,), options.response),
        columns,
        {"temperature": torch.ones(n), "execution_id": list(range(n))},
    )


def measure(options: argparse.Namespace, model: Path, case: str, folder: Path) -> dict[str, Any]:
    backend, *more = case.split()
    size = ["--max-tokens-per-gpu", str(options.max_tokens_per_gpu), "--device", options.device]
    size += ["--global-batch-size", str(options.num_samples)]
    size += ["--rollout-max-prompt-len", str(options.prompt), "--rollout-max-response-len", str(options.response)]
    where = ["--hf-checkpoint", str(model), "--prompt-data", str(model / "train.jsonl"), "--run-dir", str(folder)]
    args = parse([*FLAGS.split(), *size, *where, "--train-backend", backend, *more], "train")
    args = resolve_on_machine(args, with_engines=False)
    workers = WorkerGroup("actor", 1, folder / "logs", {"OMP_NUM_THREADS": str(num_usable_cpus())})
    try:
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), num_usable_cpus(), timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, options.steps))
        actor.load_weights(model)
        config = json.loads((model / "config.json").read_text())
        seconds, loss = [], 0.0
        turns: dict[str, list[float]] = {name: [] for name in MOVES}
        for step in range(options.steps):
            batch = batch_of(options, config["vocab_size"], step)
            began = time.monotonic()
            metrics, _ = actor.train(batch, actor.plan(batch), step)()
            seconds.append(time.monotonic() - began)
            loss = metrics[0]["loss"]
            for name, move in MOVES.items() if options.turns else ():
                began = time.monotonic()
                move(actor)()
                turns[name].append(time.monotonic() - began)
        peak, remark = actor.memory().get("trainer_peak_bytes", 0.0), workers.call("remark", timeout=300)[0]
        kernels = longest_kernels(actor, batch, options) if options.kernels else {}
    finally:
        workers.close()
    flops = options.num_samples * flops_of_sample(config, options.prompt, options.response)
    rate = len(batch.tokens) / median(seconds[1:])
    row = {name: round(median(some[1:]), 3) for name, some in turns.items() if some}
    row |= {"seconds": [round(s, 3) for s in seconds], "tokens_per_second": round(rate), "loss": loss}
    planned = allocated(args, shares=False, synced=False)  # what `instep plan` says
    row |= {"peak_gib": round(peak / 2**30, 2), "planned_gib": round(planned / 2**30, 2)}
    row |= {"tflops": round(flops / median(seconds[1:]) / 1e12, 1)}
    row |= {"remark": remark} if remark else {}
    if kernels:
        row["kernels"] = kernels
    if options.device == "cuda" and torch.cuda.get_device_name() in PEAK:
        row["mfu"] = round(row["tflops"] * 1e12 / PEAK[torch.cuda.get_device_name()], 3)
    return row


def longest_kernels(actor: RoleTrainer, batch: TokenBatch, options: argparse.Namespace) -> dict[str, list[float]]:
    """By name how often a kernel ran in a step, and for how many milliseconds; `all` of them first."""
    begin = time.time_ns()
    actor.workers.call("start_profile", [0], timeout=60)
    actor.train(batch, actor.plan(batch), options.steps)()
    end = time.time_ns()
    (spans,) = actor.workers.call("stop_profile", begin, end, 10**6, timeout=300)
    found: dict[str, list[float]] = {}
    for span in (s for s in spans if s.facts.get("kind") in ON_GPU):
        count, ms = found.get(span.name, [0, 0.0])
        found[span.name] = [count + 1, round(ms + (span.end - span.begin) / 1e6, 3)]
    largest = sorted(found.items(), key=lambda item: -item[1][1])[: options.kernels]
    total = sum(ms for _, ms in found.values())
    return {"all": [sum(n for n, _ in found.values()), round(total, 1)], **{name[:120]: v for name, v in largest}}


def flops_of_sample(config: dict[str, Any], prompt: int, response: int) -> float:
    """Forward and backward, of a sample of `prompt` + `response` tokens."""
    model = Model.of(config, bytes_per_weight=2)
    assert model is not None
    return 3 * model.forward_flops([(prompt, response)])


if __name__ == "__main__":
    main()

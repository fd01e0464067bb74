"""Families of models in bfloat16 with real vLLM on the same GPU: each trains, and each version of it is proven.

A family has a process, an engine and a trainer for each backend; several families go side by side. What was measured
is a line of each test's output. `INSTEP_TEST_ON_CPU` tries it without a GPU, where weights travel by `shm`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.models.shape import FAMILIES as OF_MEGATRON
from instep.system.scratch import Scratch, memory_root
from instep.training import lr_schedule
from instep.types import TokenBatch
from instep_engine.place import SYNC
from tests.assets import make_prompts
from tests.e2e.commands import grpo_arguments, on_vllm
from tests.e2e.test_families import train_once
from tests.families import FAMILIES, make_family

CPU = bool(os.environ.get("INSTEP_TEST_ON_CPU")) and not torch.cuda.is_available()
SECONDS = 400  # for a family, from its turn on
MEAN_GAP, LARGEST_GAP = 0.05, 0.5  # of log-probs, between trainer and engine: bfloat16, and an expert now and then
LENGTH, NUM_SAMPLES, VOCAB = 40, 6, 50
NOT_SERVED = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "vLLM 0.26 knows it with images alone")
# The slow ones begin: those that compile kernels, and those with two trainers.
FIRST = ["qwen3_next", "deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen3", "llama", "qwen2", "gemma2"]
NAMES = sorted(FAMILIES, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available() and not CPU, reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[str]]]]:
    """What `train_and_prove` says of each family that is asked for; they run side by side."""
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    names = [name for name in NAMES if name in asked and name not in NOT_SERVED]
    side_by_side = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    with (
        tempfile.TemporaryDirectory(prefix="instep-families-", ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(side_by_side, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        yield {name: pool.submit(train_and_prove, name, Path(folder) / name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains_and_each_version_is_proven(name: str, results: dict[str, Future[list[str]]]) -> None:
    if name in NOT_SERVED:
        pytest.skip(NOT_SERVED[name])
    lines = results[name].result(timeout=4 * SECONDS)
    print("", *lines, sep="\n")
    assert len(lines) == 1 + len(backends(name))


def backends(name: str) -> list[str]:
    return ["megatron", "hf"] if FAMILIES[name].model_type in OF_MEGATRON else ["hf"]


def train_and_prove(name: str, folder: Path) -> list[str]:
    """Bring three versions of each backend to an engine, with an optimizer step before the second and the third.

    Returns what was measured, a line for each backend, behind one of the starts.
    """
    began, checkpoint = time.monotonic(), make_family(name, folder / "hf", "bf16")
    make_prompts(folder / "train.jsonl", 4)
    memory, workers = Scratch(f"{SYNC}test-", memory_root()), dict[str, WorkerGroup]()
    args = {backend: arguments(folder, backend) for backend in backends(name)}
    first = next(iter(args.values()))
    engine = start_engine(first, plan_engines(first)[0], num_threads=1, log_dir=folder / "logs")
    try:
        for backend in args:  # one that begins while an engine starts
            loopback = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            workers[backend] = WorkerGroup("actor", 1, folder / "logs" / backend, loopback)
        with ThreadPoolExecutor(len(args)) as pool:
            jobs = {b: pool.submit(trainer, args[b], workers[b], folder / f"rendezvous-{b}", checkpoint) for b in args}
            actors = {backend: job.result(SECONDS) for backend, job in jobs.items()}
        trainers = time.monotonic() - began
        engine.wait_ready(SECONDS)
        lines = [f"{name}: trainers after {trainers:.0f} s, engine after {time.monotonic() - began:.0f} s"]
        version = 0
        for backend, actor in actors.items():
            sync = WeightSync(args[backend], actor, way(), memory.path, vocab_size=VOCAB, max_len=128)
            sync.version = version  # the engine is the same
            lines.append(f"{name}, {backend}: {versions(sync, actor, engine)}")
            sync.close()
            version = sync.version
            workers[backend].close()
        return lines
    except Exception as error:
        error.add_note(f"{name}, logs:\n{ends_of(folder / 'logs')}")
        raise
    finally:
        for group in workers.values():
            group.close()
        engine.stop()
        memory.remove()


def way() -> str:
    return "shm" if CPU else "ipc"


def arguments(folder: Path, backend: str) -> Args:
    flags = [*on_vllm(), "--vllm-max-model-len", "128", "--vllm-enforce-eager", "--no-torch-compile"]
    flags += ["--precision", "bf16", "--train-backend", backend, "--weight-sync", way(), "--sync-timeout", "120"]
    flags += [] if CPU else ["--vllm-gpu-memory-utilization", "0.05"]
    if backend == "megatron" and OF_MEGATRON[FAMILIES[folder.name].model_type].experts:
        flags += ["--moe-grouped-gemm"]
    if not CPU and folder.name == "qwen3_next":  # else FlashInfer's on Hopper, which is not in the bundle of GPU hosts
        flags += ["--vllm-gdn-prefill-backend", "triton"]
    args = parse(grpo_arguments(folder, folder / f"run-{backend}", *flags)[1:], "train")
    return args.replace(device="cpu" if CPU else "cuda", precision="bf16", rollout_backend="vllm")


def trainer(args: Args, workers: WorkerGroup, rendezvous: Path, checkpoint: Path) -> RoleTrainer:
    layout = workers.call("setup", args, 0, 1, str(rendezvous), 1, timeout=SECONDS)
    actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
    actor.load_weights(checkpoint)
    return actor


def versions(sync: WeightSync, actor: RoleTrainer, engine: Engine) -> str:
    """Three syncs with steps between them: how far engine and trainer are apart, how far a step moves log-probs."""
    said, before = [], list[float]()
    for step in range(3):
        if step:
            train_once(actor)
        result = sync.run([engine])
        ours, theirs = scores(actor, engine)
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        mean, largest = sum(gaps) / len(gaps), max(gaps)
        off, allowed = result.proven.last.rms, result.proven.tolerance
        said.append(f"gap {mean:.1e}, at most {largest:.1e}, proof {off:.1e} of {allowed:.1e}, {result.seconds:.1f} s")
        assert off <= allowed <= LARGEST_GAP and mean <= MEAN_GAP and largest <= LARGEST_GAP, said
        if step:
            moved = sum(abs(a - b) for a, b in zip(theirs, before, strict=True)) / len(theirs)
            said[-1] += f", moved by {moved:.1e}"
            assert moved > mean, said
        before = theirs
    return "; ".join(said)


def scores(actor: RoleTrainer, engine: Engine) -> tuple[list[float], list[float]]:
    """Log-probs of the same samples by trainer and engine."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, VOCAB, (NUM_SAMPLES, LENGTH), generator=generator)
    lengths = torch.full((NUM_SAMPLES,), LENGTH)
    batch = TokenBatch(samples.flatten(), lengths, lengths - 1, sample_columns={"temperature": torch.ones(NUM_SAMPLES)})
    theirs = [x for sample in samples.tolist() for x in engine.prompt_log_probs(sample, timeout=60)]
    return actor.probe_log_probs(batch, 120)[0], theirs


def ends_of(logs: Path, num: int = 12) -> str:
    """The last lines of every log that names an error."""
    out: list[str] = []
    for log in sorted(logs.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        errors: Sequence[str] = [line for line in lines if "Error" in line]
        out += [f"--- {log.name}", *(errors[-num:] or lines[-3:])]
    return "\n".join(out)

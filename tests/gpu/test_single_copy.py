"""Trainer and engine share one memory of a GPU (`--weight-sync single-copy`): stock vLLM, CUDA graphs and all.

    pytest -m gpu -s tests/gpu/test_single_copy.py

prints seconds and GB/s. The engine in float32 has CUDA graphs and compiled code; one of 0.6B dimensions gives the
figures. The last tests need two GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen3Config

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.probe import difference
from instep.controller.sync.session import EngineGone, Session
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.errors import SyncError
from instep.system.scratch import Scratch, memory_root
from instep.training import lr_schedule
from instep.training.hf.backend import HfBackend
from instep.training.hf.mirror import Mirror
from instep.training.hf.shards import mesh_of
from instep.training.rounding import UNITS, rounded_embedding
from instep.weights import single_copy
from instep.weights.memory import attach, digests_of
from instep.weights.way import Order, way_named
from instep_engine import MEMORY_VARIABLE
from instep_engine.place import SYNC
from tests.assets import make_checkpoint, make_tokenizer
from tests.e2e.commands import grpo_arguments
from tests.e2e.test_single_copy import TOKENS, Pair, synced
from tests.e2e.test_sync_proof import train_once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BOUNDED = "--vllm-gpu-memory-utilization 0.1 --vllm-kv-cache-memory-bytes 1073741824 --vllm-max-model-len 128"
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
HBM = 3.0e12  # bytes a second that an H100 reads and writes
FLOOR = 6  # bytes a parameter: a float32 master is read, a bf16 weight is written


def arguments(checkpoint: Path, root: Path, precision: str, *more: str, num_gpus: int = 1) -> Args:
    (root / "train.jsonl").write_text('{"prompt": "1", "label": "1"}\n')  # it is not read
    flags = ["--rollout-backend", "vllm", "--colocate", "--weight-sync", "single-copy", *BOUNDED.split(), *more]
    flags += ["--device", "cuda", "--precision", precision, "--actor-num-gpus-per-node", str(num_gpus)]
    given = grpo_arguments(root, root / "run", "--hf-checkpoint", str(checkpoint), *flags)
    return parse(given[1:], "train")


@contextmanager
def trainer(args: Args, root: Path, size: int = 1) -> Iterator[RoleTrainer]:
    """The workers of a trainer, with the weights of --hf-checkpoint."""
    workers = WorkerGroup("actor", size, root / "logs", {"OMP_NUM_THREADS": "4"})
    try:
        meeting = root / f"rendezvous-{time.monotonic_ns()}"
        layout = workers.call("setup", per_rank=[(args, r, size, str(meeting), 4) for r in range(size)], timeout=180)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(Path(args.hf_checkpoint))
        yield actor
    finally:
        workers.close()


@contextmanager
def engine_of(args: Args, checkpoint: Path, root: Path) -> Iterator[tuple[Engine, Path]]:
    """The engine, which begins with the weights of `checkpoint`, and the folder in which it shares them."""
    scratch = Scratch(f"{SYNC}gpu-", memory_root())
    env = {MEMORY_VARIABLE: str(scratch.path)}
    args = args.replace(hf_checkpoint=str(checkpoint))
    engine = start_engine(args, plan_engines(args)[0], num_threads=4, log_dir=root / "logs", env=env)
    try:
        engine.wait_ready(300)
        yield engine, scratch.path
    finally:
        engine.stop()
        scratch.remove()


# ---- figures at 0.6B dimensions --------------------------------------------------------------------------------------


class InProcess:
    """The trainer's side of a sync, with its one rank in this process."""

    def __init__(self, backend: HfBackend):
        self.backend = backend

    def watch(self) -> None:
        pass

    def publish(self, way: str, order: Order, *, timeout: float, on_event: Callable[[Any], None]) -> None:
        way_named(way).send(self.backend.weight_source(), order, on_event)

    def weight_digests(self, way: str, timeout: float) -> dict[str, str]:
        assert way == "single-copy"
        return single_copy.WAY.digests(self.backend.weight_source())

    def unwritten_weights(self, timeout: float) -> list[str]:
        return single_copy.WAY.unwritten(self.backend.weight_source())

    def probe_log_probs(self, batch: Any, timeout: float) -> tuple[list[float], list[float]]:
        (plain,) = self.backend.forward_only([batch])
        with rounded_embedding(self.backend.embedding, UNITS["bf16"]):
            (rounded,) = self.backend.forward_only([batch])
        return plain.log_probs.tolist(), rounded.log_probs.tolist()


def big_checkpoint(folder: Path) -> Path:
    """Random weights of Qwen3's published 0.6B dimensions, made on the GPU."""
    from transformers import AutoModelForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def timed(call: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of each call, with all of its work on the GPU, in order of size."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - began))
    return sorted(found)


def written_through(mirror: Mirror) -> None:
    mirror.changed()
    mirror.refresh()


def test_write_through_and_session_at_06b(tmp_path: Path) -> None:
    """Writes at HBM's speed, a session of 0.1 s, and a trainer without a copy of the model."""
    checkpoint = big_checkpoint(tmp_path / "hf")
    torch.cuda.empty_cache()
    args = arguments(checkpoint, tmp_path, "bf16", "--vllm-enforce-eager")
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with engine_of(args, checkpoint, tmp_path) as (engine, folder):
            config, device = AutoConfig.from_pretrained(checkpoint), torch.device("cuda", 0)
            before = torch.cuda.memory_allocated()
            backend = HfBackend(args, hf_config=config, device=device, dtype=torch.bfloat16)
            backend.load_hf(checkpoint)
            actor: Any = InProcess(backend)
            sync = WeightSync(args, actor, "single-copy", folder, vocab_size=50, max_len=128)
            probe = sync.run([engine]).proven.last.largest
            numel = sum(p.numel() for p in backend.policy.parameters())
            held = (torch.cuda.memory_allocated() - before) / numel
            assert held < 12.2  # bytes a parameter: masters and moments, and no weights of bf16
            mirror = backend._mirror
            assert mirror is not None
            write = partial(written_through, mirror)
            ours, theirs = mirror.compute.model.get_parameter(DOWN), attach(folder, lock=False)
            assert ours.data_ptr() == theirs.whole(DOWN).data_ptr() and len(theirs.shapes) > 300
            written = timed(write, 20)
            sampler = mirror._sampler
            assert sampler is not None
            digests = timed(lambda: [digests_of(found) for found in sampler.samples().values()], 10)
            results = [sync.run([engine]) for _ in range(20)]
            whole = sorted(1e3 * (r.seconds - r.seconds_of["proof"]) for r in results)
            pause = sorted(1e3 * r.seconds_of["paused"] for r in results)
            assert not any(r.num_bytes for r in results)
            floor = 1e3 * FLOOR * numel / HBM
            speed = FLOOR * numel / written[10] / 1e6
            print(f"\n{numel / 1e9:.3f} B parameters, {held:.2f} bytes each in the trainer, probe {probe:.2e}")
            print(f"write-through {written[10]:.2f} ms (p95 {written[18]:.2f}), {speed:.0f} GB/s, floor {floor:.2f} ms")
            steps = ", ".join(f"{step} {1e3 * seconds:.1f}" for step, seconds in results[-1].seconds_of.items())
            print(f"digests {digests[5]:.1f} ms; of the last session, ms: {steps}")
            print(f"paused {pause[10]:.1f} ms (p95 {pause[18]:.1f}), session {whole[10]:.1f} ms (p95 {whole[18]:.1f})")
            assert written[10] <= 2 * floor and digests[0] <= 50 and whole[10] <= 100 and pause[10] <= 60
            for _ in range(2):
                backend.policy.model.get_parameter(NORM).data.mul_(1.25)
                backend._changed()
                assert sync.run([engine]).proven.last.largest < 0.5
            sync.close()
            del backend, actor, mirror, ours, theirs
    finally:
        torch.compiler.set_stance("default")
        dist.destroy_process_group()
        mesh_of.cache_clear()


# ---- one GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Pair]:
    """A float32 engine with CUDA graphs and compiled code; it gets a trainer in each test."""
    root = tmp_path_factory.mktemp("tiny")
    checkpoint = make_checkpoint(root / "hf", head_dim=32)
    args = arguments(checkpoint, root, "fp32", "--vllm-max-num-seqs", "8")
    with engine_of(args, make_checkpoint(root / "stale", seed=7, head_dim=32), root) as (engine, folder):
        yield Pair(args, None, engine, folder, root)  # type: ignore[arg-type]


@pytest.fixture
def pair(served: Pair) -> Iterator[Pair]:
    args = served.args.replace(no_torch_compile=True)
    with trainer(args, served.logs) as actor:
        yield Pair(args, actor, served.engine, served.folder, served.logs)


@pytest.fixture
def sync(pair: Pair) -> Iterator[WeightSync]:
    yield from synced(pair)


NEAR = 1e-5  # of log-probs, relative to the largest


def gap_after_steps(pair: Pair, sync: WeightSync, folder: Path) -> float:
    """The largest gap of the engine's log-probs to transformers' with the trainer's export, after each of two steps.

    No byte is sent.
    """
    worst = 0.0
    for number in range(2):
        before = pair.scores()
        sync.hold([pair.engine])
        pair.step()
        result = sync.run([pair.engine])
        twin = pair.exported_scores(folder / str(number), torch.float32)
        after = pair.scores()
        gap = float((after - twin).abs().max() / twin.abs().max())
        print(f"log-probs moved by {float((after - before).abs().mean()):.3f}, {gap:.1e} from transformers'")
        assert result.num_bytes == 0 and result.num_tensors > 20
        assert (after - before).abs().max() > 1e-3
        worst = max(worst, gap)
    return worst


def test_the_engine_follows_a_compiled_trainer_to_1e_5(served: Pair, tmp_path: Path) -> None:
    with trainer(served.args, served.logs) as actor:
        pair = Pair(served.args, actor, served.engine, served.folder, served.logs)
        for sync in synced(pair):
            assert gap_after_steps(pair, sync, tmp_path) <= NEAR
            assert sync.run([pair.engine], "disk").num_bytes > 0  # every byte is compared, none is loaded


def test_a_write_of_anybody_is_seen_by_engine_and_trainer_bit_for_bit(pair: Pair, sync: WeightSync) -> None:
    """This process is a third one that opens the memory."""
    result = sync.run([pair.engine])
    view, scores = pair.memory().whole(NORM), pair.scores()
    assert view is not None and view.is_cuda
    kept = view.clone()
    view.mul_(1.5)
    torch.cuda.synchronize()
    pair.engine.reset_cache(timeout=60)
    changed = pair.scores()
    assert (changed - scores).abs().max() > 1e-2
    expected = sync.proof._trainer_scores(Session(pair.args, pair.actor, [pair.engine], 1, pair.folder)).plain
    found = sync.proof.engine_scores(pair.engine, Session(pair.args, pair.actor, [pair.engine], 1, pair.folder))
    assert difference(expected, found).rms <= 2 * result.proven.tolerance  # both have the new norm
    view.copy_(kept)
    torch.cuda.synchronize()
    pair.engine.reset_cache(timeout=60)
    assert torch.equal(pair.scores(), scores)
    for name, tensor in ((n, pair.memory().whole(n)) for n in pair.memory().shapes):
        assert tensor is not None, name  # a view of each


def test_a_second_trainer_is_refused_and_the_next_one_is_not(served: Pair) -> None:
    """A trainer that has ended leaves the engine its memory, and no lock."""
    for _ in range(2):
        with trainer(served.args.replace(no_torch_compile=True), served.logs) as actor:
            with_actor = Pair(served.args, actor, served.engine, served.folder, served.logs)
            for sync in synced(with_actor):
                sync.run([served.engine])
                with pytest.raises(SyncError, match="another trainer is attached"):
                    attach(served.folder, lock=True)
        torch.cuda.synchronize()
        served.engine.reset_cache(timeout=60)
        assert torch.isfinite(served.scores()).all()


def test_megatron_writes_slices(served: Pair, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    args = served.args.replace(train_backend="megatron")
    with trainer(args, served.logs) as actor:
        pair = Pair(args, actor, served.engine, served.folder, served.logs)
        for sync in synced(pair):
            assert gap_after_steps(pair, sync, tmp_path) <= NEAR


def test_the_weights_outlive_an_engine_and_move_into_the_next_one(tmp_path: Path) -> None:
    """The trainer has the memory of an engine open that is killed."""
    checkpoint = make_checkpoint(tmp_path / "hf", head_dim=32)
    args = arguments(checkpoint, tmp_path, "bf16", "--vllm-enforce-eager", "--no-torch-compile")
    with engine_of(args, checkpoint, tmp_path) as (engine, folder), trainer(args, tmp_path) as actor:
        pair = Pair(args, actor, engine, folder, tmp_path)
        for sync in synced(pair):
            sync.hold([engine])
            pair.step()
            sync.run([engine])
            scores, weights, old = pair.scores(), actor.weight_digests("disk", 60), pair.memory().nonces
            assert engine.process is not None
            engine.process.kill()
            with pytest.raises(EngineGone):
                sync.run([engine])
            assert actor.weight_digests("disk", 60) == weights
            engine.process = pair.start(int(engine.url.rpartition(":")[2])).process
            engine.wait_ready(300)
            assert pair.memory().nonces != old
            sync.rejoin(engine)
            assert (pair.scores() - scores).abs().max() < 1e-2


# ---- two GPUs --------------------------------------------------------------------------------------------------------


@TWO
@pytest.mark.parametrize("backend,tp", [("hf", 1), ("hf", 2), ("megatron", 2)])
def test_two_gpus_hold_the_shards_of_an_engine_and_a_rank_each(backend: str, tp: int, tmp_path: Path) -> None:
    """Each rank of the trainer writes the memory of the engine's rank on its own GPU, and no other.

    With TP of the hf backend its parameters are views of that memory.
    """
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    checkpoint = make_checkpoint(tmp_path / "hf", head_dim=32)
    more = [
        "--rollout-num-gpus-per-engine",
        "2",
        "--vllm-enforce-eager",
        "--vllm-disable-custom-all-reduce",
        "--train-backend",
        backend,
        "--no-torch-compile",
    ]
    more += ["--tensor-model-parallel-size", str(tp)]
    args = arguments(checkpoint, tmp_path, "fp32", *more, num_gpus=2)
    stale = make_checkpoint(tmp_path / "stale", seed=7, head_dim=32)
    with engine_of(args, stale, tmp_path) as (engine, folder), trainer(args, tmp_path, 2) as actor:
        pair = Pair(args, actor, engine, folder, tmp_path)
        memory = pair.memory()
        assert len(memory.nonces) == 2 and len(memory.slices) == 1  # this process is on one of the two GPUs
        for sync in synced(pair):
            assert gap_after_steps(pair, sync, tmp_path) <= NEAR
            sync.run([engine], "disk")  # every byte of both ranks


@TWO
def test_a_rank_beside_the_engine_writes_nothing(tmp_path: Path) -> None:
    """Two data-parallel ranks around an engine on the first GPU."""
    checkpoint = make_checkpoint(tmp_path / "hf", head_dim=32)
    args = arguments(checkpoint, tmp_path, "fp32", "--vllm-enforce-eager", "--no-torch-compile")
    stale = make_checkpoint(tmp_path / "stale", seed=7, head_dim=32)
    with engine_of(args, stale, tmp_path) as (engine, folder), trainer(args, tmp_path, 2) as actor:
        pair = Pair(args, actor, engine, folder, tmp_path)
        for sync in synced(pair):
            for _ in range(2):
                sync.hold([engine])
                train_once(actor.workers, 1e-3)
                result = sync.run([engine])
                assert result.num_bytes == 0 and result.proven.last.rms <= result.proven.tolerance
            sync.run([engine], "disk")
        assert torch.isfinite(torch.tensor(engine.prompt_log_probs(TOKENS, timeout=60))).all()

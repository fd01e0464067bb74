"""Families of models with real vLLM: each trains, and each way brings its weights to an engine that proves them."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import torch

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.controller.role import RoleTrainer
from instep.controller.sync.proof import ALLOWED
from instep.controller.sync.weight_sync import WeightSync
from instep.data.batch import build_batch
from instep.engines.engine import Engine
from instep.system.scratch import Scratch, memory_root
from instep.training import lr_schedule
from instep.types import Sample
from instep.weights.memory import attach
from instep.weights.way import RESTART, SINGLE_COPY
from instep_engine import MEMORY_VARIABLE
from instep_engine.place import SYNC
from tests.assets import make_prompts
from tests.distributed.helpers import started_workers
from tests.distributed.margins import FAMILIES as LIKE_TRAINED
from tests.distributed.margins import make_model
from tests.e2e.commands import grpo_arguments, on_sglang, on_vllm
from tests.families import FAMILIES, family_config, make_family, make_published

DENSE = "phi qwen2 qwen3 llama yi mistral phi3 gemma gemma2 starcoder2".split()
SERVING = {"vllm": on_vllm(), "embedded": ["--rollout-backend", "embedded"], "sglang": on_sglang()}
LIMITS = {"fp32": 1.1e-4, "bf16": 0.5}  # of what a proof allows
pytestmark = pytest.mark.vllm


def train_once(actor: RoleTrainer) -> None:
    """One optimizer step on two samples of different lengths, longer than the window of the families that have one;
    two data-parallel ranks take one each."""
    done = Sample.Status.COMPLETED
    samples = [
        Sample(group_index=0, index=i, tokens=list(range(5, 5 + n)), response_length=n - 8, reward=1.0, status=done)
        for i, n in enumerate((44, 21))
    ]
    batch = build_batch([samples])
    size = int(batch.response_lengths.sum())
    batch.token_columns["advantages"] = torch.ones(size)
    batch.token_columns["loss_weights"] = torch.full((size,), 1 / size)
    (metrics,), _ = actor.train(batch, [[[[0, 1]]] if actor.args.dp_size == 1 else [[[0]], [[1]]]], 0)()
    assert metrics["grad_norm"] > 0 and not metrics["skipped_steps"]


EMPTY_TORCHVISION = """
import sys
from unittest.mock import MagicMock

for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"torchvision.{name}"] = MagicMock()
"""


def empty_torchvision(folder):
    """vLLM imports it for a family whose checkpoints may hold images; text needs nothing of it. Returns its home."""
    home = folder / "empty" / "torchvision"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text(EMPTY_TORCHVISION)
    about = home.parent / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: torchvision\nVersion: 0.28.0\n")
    return home.parent


class Stack(NamedTuple):
    """The arguments, the trainer and the engine of a family, and a folder through which weights travel."""

    args: Args
    actor: RoleTrainer
    engine: Engine
    folder: Path
    start_anew: Callable[[Sequence[Engine], Path], None]

    def sync(self):
        options = {"vocab_size": 50, "max_len": 128, "start_on": self.start_anew}
        return WeightSync(self.args, self.actor, self.args.weight_sync, self.folder, **options)

    def difference(self, sync, way):
        """The largest difference of log-probs in the proof of a sync by `way`, and the one that is allowed."""
        result = sync.run([self.engine], way)
        print(f"{way}: version {result.version} proven, off by {result.proven.last.largest:.1e}")
        return result.proven.last.rms, result.proven.tolerance


@contextlib.contextmanager
def stack(name, folder, *more, kind="vllm", sizes=MappingProxyType({}), peaked_in=None, published=False, prepare=None):
    """The stack of a family.

    Args:
        kind: of the engine; with the embedded one in float32.
        sizes: of the model, instead of the family's.
        peaked_in: a precision, in which random tokens are unlikely under the model.
        published: the folder has layers for images, too.
        prepare: changes the checkpoint.
    """
    family = FAMILIES[name]
    precision = peaked_in or (family.precision if kind == "vllm" else "fp32")
    if peaked_in:
        checkpoint = make_model(name, folder / "hf", precision, peaked=True)
    elif published:
        checkpoint = make_published(
            family_config(name, **sizes), folder / "hf", stacked="num_experts" in family.settings
        )
    else:
        checkpoint = make_family(name, folder / "hf", precision, **sizes)
    if prepare is not None:
        prepare(checkpoint)
    make_prompts(folder / "train.jsonl", 4)
    flags = [*SERVING[kind], "--vllm-max-model-len", "128", "--precision", precision, *more]
    args = parse(grpo_arguments(folder, folder / "run", *flags)[1:], "train").replace(device="cpu")
    memory, logs = Scratch(f"{SYNC}test-", memory_root()), folder / "logs"
    n = args.world_size
    workers = started_workers(args, "actor", n, logs)
    # The other engines would share all weights.
    env = {MEMORY_VARIABLE: str(memory.path)} if kind == "vllm" or args.weight_sync == SINGLE_COPY else {}
    if name.startswith("qwen3_5"):
        env["PYTHONPATH"] = os.pathsep.join([str(empty_torchvision(folder)), os.environ.get("PYTHONPATH", "")])
    spec = plan_engines(args)[0]
    engine = start_engine(args, spec, num_threads=1, log_dir=logs, env=env)

    def start_anew(engines, checkpoint):
        engine.stop()
        options = {"num_threads": 1, "log_dir": logs, "env": env, "port": urlsplit(engine.url).port}
        engine.process = start_engine(args, spec.on(checkpoint), **options).process

    try:
        ranks = [(args, rank, n, str(folder / "rendezvous"), 1) for rank in range(n)]
        layout = workers.call("setup", per_rank=ranks, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(checkpoint)
        slower = "which is slower" in actor.workers.call("remark", timeout=60)[0]
        assert slower is not (family.packed or args.train_backend == "megatron")
        engine.wait_ready(600)
        yield Stack(args, actor, engine, memory.path, start_anew)
    finally:
        workers.close()
        engine.stop()
        memory.remove()


def by_every_way(made):
    """Sync by each way, with a step of the trainer after it; return the difference and the tolerance of each."""
    sync, found = made.sync(), []
    try:
        for way in ("shm", "disk", "nccl", "ipc", "shm", RESTART):
            found.append(made.difference(sync, way))
            train_once(made.actor)
    finally:
        sync.close()
    return found


def in_one_memory(made):
    """Let the trainer step in the engine's memory, which holds each weight as a whole; return as `by_every_way`."""
    sync, found = made.sync(), []
    try:
        for way in (SINGLE_COPY, SINGLE_COPY, "disk"):  # the last compares every byte
            if way == SINGLE_COPY:
                sync.hold([made.engine])
                train_once(made.actor)
            found.append(made.difference(sync, way))
        memory = attach(made.folder, lock=False)
        assert [n for n in memory.shapes if memory.whole(n) is None] == []
    finally:
        sync.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "hf") for name in FAMILIES),
        *((name, "megatron") for name in ("deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe")),
    ],
)
def test_a_family_trains_and_is_proven_by_every_way(name, backend, tmp_path):
    with stack(name, tmp_path, "--train-backend", backend, "--weight-sync", "shm") as made:
        assert all(off <= allowed <= LIMITS[FAMILIES[name].precision] for off, allowed in by_every_way(made))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("qwen3_5", "hf"), ("qwen3_5_moe", "megatron")])
def test_a_folder_with_layers_for_images_is_proven_by_every_way(name, backend, tmp_path):
    with stack(name, tmp_path, "--train-backend", backend, "--weight-sync", "shm", published=True) as made:
        assert all(off <= allowed <= LIMITS["bf16"] for off, allowed in by_every_way(made))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [*((name, "bf16") for name in LIKE_TRAINED), ("qwen3", "fp32")])
def test_a_peaked_model_is_proven_at_the_default_tolerance(name, precision, tmp_path):
    """As a trained one has it: random tokens have a mean log-prob below -20."""
    with stack(name, tmp_path, "--weight-sync", "shm", "--lr", "1e-5", peaked_in=precision) as made:
        sync = made.sync()
        try:
            for way in ("shm", "disk", "nccl", "ipc", "shm", "shm"):
                result = sync.run([made.engine], way)
                over = result.proven.last.rms / max(result.proven.rounding.rms, 1e-9)
                print(f"{name} {precision} {way}: {over:.2f} roundings, {result.proven.tolerance:.1e} allowed")
                assert over < ALLOWED or precision == "fp32"
                assert result.proven.last.rms <= result.proven.tolerance
                train_once(made.actor)
        finally:
            sync.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_family_shares_one_memory_with_the_trainer(name, tmp_path):
    """Biases, norms of other kinds and a window: the map is recorded, whatever the layers are called."""
    with stack(name, tmp_path, "--weight-sync", SINGLE_COPY) as made:
        assert all(off <= allowed <= LIMITS[FAMILIES[name].precision] for off, allowed in in_one_memory(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "hf") for name in FAMILIES), *((name, "megatron") for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"))],
)
def test_the_adapter_of_a_family_is_proven_by_every_way(name, backend, tmp_path):
    """Each layer with an adapter counts: a step moves all of B, and the next proof compares log-probs."""
    flags = ["--train-backend", backend, "--lora-rank", "4", "--weight-sync", "lora", "--lr", "1e-2"]
    with stack(name, tmp_path, *flags) as made:
        sync = made.sync()
        try:
            for way in ("lora", "lora_ipc", "lora_disk", "lora"):
                off, allowed = made.difference(sync, way)
                assert off <= allowed <= LIMITS[FAMILIES[name].precision]
                train_once(made.actor)
        finally:
            sync.close()

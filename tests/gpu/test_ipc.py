"""The way `ipc` between real processes on one GPU, and on two: what the engine computes with afterwards, and how fast.

The weights of most tests come from this process, so that they can be spoilt on their way; `python -m pytest -s` prints
the figures.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import pytest
import torch

from instep.arguments.parse import parse
from instep.checkpoints.weight_files import opened, weight_files
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import Session
from instep.controller.sync.weight_sync import WeightSync
from instep.errors import SyncError
from instep.training import lr_schedule
from instep.weights import ipc
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import way_named
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments, run, sync_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALWAYS_THERE = ["--no-offload-train", "--no-offload-rollout"]
BOUNDED = ["--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", "1073741824"]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
PROMPT = list(range(5, 37))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with `hf/` and `train.jsonl`."""
    root = tmp_path_factory.mktemp("tiny")
    make_checkpoint(root / "hf", head_dim=64)
    make_prompts(root / "train.jsonl", 64)
    return root


def arguments(tiny, folder, model, *more, precision="bf16"):
    flags = ["--rollout-backend", "vllm", "--device", "cuda", "--precision", precision, "--colocate", *BOUNDED]
    flags += ["--weight-sync", "ipc", "--hf-checkpoint", str(model), "--sync-timeout", "60", *ALWAYS_THERE, *more]
    args = parse(grpo_arguments(tiny, folder, *flags)[1:], "train")
    return args.replace(device="cuda", precision=precision, rollout_backend="vllm", update_weight_buffer_size=200_000)


class Source(WeightSource):
    emits = True

    def __init__(self, tensors):
        self.tensors = tensors
        self.specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]

    def __iter__(self):
        return zip(self.specs, self.tensors.values(), strict=True)


class HereIsTheTrainer:
    """Sends from this process what `tensors` says."""

    def __init__(self, folder):
        self.tensors = {}
        for path in sorted(set(weight_files(folder).values())):
            with opened(path) as file:
                self.tensors |= {name: file.get_tensor(name).to("cuda", torch.bfloat16) for name in file.keys()}

    def publish(self, way, order, *, timeout, on_event):
        way_named(way).send(Source(self.tensors), replace(order, device="cuda:0"), on_event)

    def change(self, scale=0.05):
        for tensor in self.tensors.values():
            tensor.mul_(1 + scale * torch.randn_like(tensor))

    def watch(self):
        pass


@pytest.fixture(scope="module", params=["tied", "untied"])
def stack(request, tiny, tmp_path_factory):
    """An engine with CUDA graphs whose checkpoint is stale."""
    folder = tmp_path_factory.mktemp(request.param)
    stale, model = (
        make_checkpoint(folder / name, tied=request.param == "tied", seed=seed, head_dim=64)
        for name, seed in (("stale", 7), ("hf", 0))
    )
    args = arguments(tiny, folder, stale, "--vllm-compilation-config", json.dumps(GRAPHS))
    engine = start_engine(args, plan_engines(args)[0], num_threads=4, log_dir=folder / "logs")
    try:
        engine.wait_ready(300)
        yield args, engine, HereIsTheTrainer(model)
    finally:
        engine.stop()


def transfer(stack, way="ipc", version=[0]):  # noqa: B006 - counts
    args, engine, trainer = stack
    version[0] += 1
    session = Session(args, trainer, [engine], version[0], sync_folder(args))
    return session, session.transfer(way)


def answer(engine):
    """The log-probs of a prompt, and tokens of a greedy decode, which runs in a CUDA graph."""
    request = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}}
    tokens = engine.post("/inference/v1/generate", request, timeout=60)["choices"][0]["token_ids"]
    return engine.prompt_log_probs(PROMPT, timeout=60), tokens


def test_what_ipc_brings_is_bit_for_bit_what_a_checkpoint_brings(stack):
    """Over several syncs: the first loads with vLLM's own `load_weights`, later ones as it has copied then."""
    _, engine, trainer = stack
    seen, first = [], {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    for _ in range(3):
        _, sent = transfer(stack)
        assert {t.name for t in sent.tensors} == trainer.tensors.keys()
        by_ipc = answer(engine)
        transfer(stack, "disk")
        assert answer(engine) == by_ipc and by_ipc not in seen
        seen.append(by_ipc)
        trainer.change()
    for name, tensor in first.items():
        trainer.tensors[name].copy_(tensor)
    transfer(stack)
    assert answer(engine) == seen[0]


@pytest.mark.parametrize("fault", ["torn", "swapped", "stale", "transposed"])
def test_what_is_not_what_was_announced_is_refused_by_name(stack, monkeypatch, fault):
    """The bucket changes after its checksums were made; the next session succeeds."""
    _, engine, trainer = stack
    transfer(stack)
    trainer.change()
    tell, names, square = ipc._Stream._tell, list(trainer.tensors), "model.layers.0.self_attn.o_proj.weight"
    old = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    trainer.change()

    def spoilt(self, message):
        if "tensors" in message:
            data = self.buckets[message["slot"]].data
            for t in message["tensors"][:2]:
                place = data[t["offset"] : t["offset"] + t["nbytes"]]
                if fault == "torn":
                    place[-1] ^= 1
                elif fault == "stale":
                    place.copy_(old[t["name"]].contiguous().view(-1).view(torch.uint8))
                elif fault == "transposed" and len(t["shape"]) == 2:
                    weight = place.view(torch.bfloat16).view(t["shape"])
                    place.copy_(weight.T.contiguous().view(-1).view(torch.uint8))
                elif fault == "swapped":
                    place.copy_(place.roll(2))
            torch.cuda.synchronize()
        tell(self, message)

    monkeypatch.setattr(ipc._Stream, "_tell", spoilt)
    began = time.monotonic()
    with pytest.raises(SyncError, match=r"do not have the checksum.*\(tensor (.+)\)") as error:
        transfer(stack)
    assert time.monotonic() - began < 10 and engine.url in str(error.value) and error.value.remedy
    assert any(name in str(error.value) for name in (*names, square))
    monkeypatch.undo()
    transfer(stack)


def test_another_shape_is_refused_by_name(stack):
    _, _, trainer = stack
    name = "model.layers.1.mlp.up_proj.weight"
    whole = trainer.tensors[name]
    trainer.tensors[name] = whole[:-1]
    began = time.monotonic()
    with pytest.raises(SyncError, match=name):
        transfer(stack)
    assert time.monotonic() - began < 10
    trainer.tensors[name] = whole
    transfer(stack)


def test_memory_stays_two_buckets(stack):
    transfer(stack)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        transfer(stack)
    assert torch.cuda.memory_allocated() <= before


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Random weights of the dimensions of Qwen3-0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3-0.6b")
    make_checkpoint(folder)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def test_seconds_of_twenty_syncs(published, tiny, tmp_path):
    """A worker of the hf backend and an engine on one GPU, 0.6B; nothing in flight."""
    args = arguments(tiny, tmp_path, published, "--vllm-enforce-eager", "--vllm-max-model-len", "1024")
    args = args.replace(update_weight_buffer_size=512 << 20)
    workers = WorkerGroup("actor", 1, tmp_path / "logs")
    engine = start_engine(args, plan_engines(args)[0], num_threads=4, log_dir=tmp_path / "logs")
    try:
        layout = workers.call("setup", args, 0, 1, str(tmp_path / "rendezvous"), 4, timeout=200)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(published)
        engine.wait_ready(300)
        syncs = WeightSync(args, actor, "ipc", sync_folder(args), vocab_size=151936, max_len=1024)
        results = [syncs.run([engine]) for _ in range(20)]
    finally:
        workers.close()
        engine.stop()
    print(f"\nfirst: {milliseconds(results[0])}")
    for step in sorted(results[-1].seconds_of):
        values = sorted(1e3 * r.seconds_of.get(step, 0.0) for r in results[1:])
        print(f"{step:12} p50 {statistics.median(values):7.1f} ms   p95 {values[-2]:7.1f} ms")
    sessions = sorted(1e3 * (r.seconds - r.seconds_of["proof"]) for r in results[1:])
    pauses = sorted(1e3 * r.seconds_of["paused"] for r in results[1:])
    num_bytes = results[-1].num_bytes
    print(f"session p50 {statistics.median(sessions):.1f} ms, pause p50 {statistics.median(pauses):.1f} ms, ", end="")
    print(f"{num_bytes / 1e9:.2f} GB, {num_bytes / 1e6 / statistics.median(pauses):.1f} GB/s of the pause")
    assert num_bytes > 1.1e9 and statistics.median(sessions) <= 100 and statistics.median(pauses) <= 60


def milliseconds(result):
    return ", ".join(f"{step} {1e3 * seconds:.1f} ms" for step, seconds in result.seconds_of.items())


def a_run(tiny, tmp_path, *more):
    """The bytes of the syncs of two rollouts; the second brings what the optimizer has changed, and each is proven."""
    flags = ["--rollout-backend", "vllm", "--device", "cuda", "--precision", "bf16", "--colocate", *BOUNDED]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--vllm-enforce-eager", *more), 300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "weights travel by ipc" in done.stderr + done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    synced = [row for row in rows if "sync/version" in row]
    print(*(f"{k} {v:.4g}" for k, v in synced[-1].items() if k.startswith("sync/")), sep="; ")
    return [row["sync/bytes"] for row in synced]


@pytest.mark.parametrize("more", [[], ALWAYS_THERE], ids=["turns", "always there"])
def test_auto_chooses_it_for_a_colocated_run(tiny, tmp_path, more):
    first, second = a_run(tiny, tmp_path, *more)
    assert min(first, second) > 100_000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_two_ranks_serve_the_workers_on_their_own_gpus(tiny, tmp_path, num_gpus):
    """FSDP2 over two ranks; one engine with TP 2, or two engines."""
    several = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", str(num_gpus)]
    first, second = a_run(tiny, tmp_path, *several, "--vllm-disable-custom-all-reduce", *ALWAYS_THERE)
    assert min(first, second) > 100_000

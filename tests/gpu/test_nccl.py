"""The way `nccl` over NCCL: two GPUs, a trainer on the first and an engine on the second."""

import json
import os
import subprocess
import sys
import threading
import time
from statistics import median

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.random_model import dimensions
from instep.arguments.parse import parse
from instep.controller.controller import Controller
from instep.engines.engine import Engine
from instep.errors import InstepError, SyncError
from instep.weights.nccl import Nccl
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Order
from instep_engine.checksums import ROW_BYTES, checksums
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments

pytestmark = pytest.mark.gpu
CPU = bool(os.environ.get("INSTEP_TEST_ON_CPU"))  # tries the tests of two GPUs without one
on_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_two = pytest.mark.skipif(torch.cuda.device_count() < 2 and not CPU, reason="needs two GPUs")
GIB = 1 << 30


@on_one
def test_checksums_are_those_of_a_cpu():
    rows = [1, 5000, 70000, 3]
    data = torch.randint(0, 255, (sum(rows) * ROW_BYTES,), dtype=torch.uint8)
    assert checksums(data.cuda(), rows) == checksums(data, rows)
    large = torch.randint(0, 255, (GIB,), dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        checksums(large, [GIB // ROW_BYTES])
        seconds.append(time.monotonic() - began)
    print(f"checksum of 1 GiB: {median(seconds) * 1e3:.2f} ms, {GIB / median(seconds) / 1e9:.0f} GB/s")


class Source(WeightSource):
    """Random weights of the names and shapes of a Qwen3."""

    emits = True

    def __init__(self, size, device):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(Qwen3Config(**dimensions(size)))
        shapes = {name: t.shape for name, t in model.named_parameters()}  # tied ones once
        self.specs = [TensorSpec(name, tuple(shape), torch.bfloat16) for name, shape in shapes.items()]
        self.weights = [torch.randn(s.shape, dtype=s.dtype, device=device) for s in self.specs]

    def __iter__(self):
        return zip(self.specs, self.weights, strict=True)


class Peer:
    """A session with a receiver in a process of its own, which has died if it does not answer."""

    disk_folder = None

    def __init__(self, folder, source, way):
        self.memory_folder, self._source, self._way = folder, source, way
        self.device = "cpu" if CPU else "cuda:1"
        command = [sys.executable, "-m", "tests.gpu.stream_peer", self.device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.more, self.answer = {}, {}

    def ask(self, info):
        self.process.stdin.write(json.dumps(info) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SyncError("the peer is gone")
        return json.loads(line)

    def receivers(self):
        return str(self.process.pid), 1

    def publish(self, folder, on_event, audience="", num_receivers=0):
        order = Order("3", "nonce", folder, 512 << 20, folder, 60.0, audience, num_receivers)
        self._way.send(self._source, order, on_event)

    def deliver(self, info, failed=None):
        try:
            self.answer = self.ask({**info, **self.more})
        except SyncError:
            failed()
            raise

    def seconds_left(self):
        return 60.0


@on_two
def test_a_stream_of_4b_arrives_whole_and_fast(tmp_path):
    source, way = Source("0.5b" if CPU else "4b", "cpu" if CPU else "cuda:0"), Nccl()
    peer = Peer(tmp_path, source, way)
    try:
        for number in range(2 if CPU else 6):
            peer.more = {"digests": number == 0}
            began = time.monotonic()
            sent = way.drive(peer)
            seconds, parts = time.monotonic() - began, {name: round(s, 4) for name, s in sent.seconds.items()}
            print(f"sync {number}: {seconds:.4f} s, receiver {peer.answer['seconds']:.4f} s, {parts}")
            if number == 0:
                assert peer.answer["digests"] == sent.digests
        num_bytes = sum(t.nbytes for t in sent.tensors)
        floor = broadcast_seconds(peer, way) * num_bytes / GIB
        held = torch.cuda.max_memory_allocated(0) / GIB if not CPU else 0.0
        print(f"{num_bytes / 1e9:.2f} GB in {seconds:.4f} s, at the rate of a 1-GiB broadcast {floor:.4f} s, ", end="")
        print(f"ratio {seconds / floor:.2f}; peak of the sender {held:.2f} GiB")
        assert CPU or (seconds <= min(0.21, 3 * floor) and held < 1.3 * num_bytes / GIB + 2)
    finally:
        peer.process.kill()


def broadcast_seconds(peer, way):
    """The median seconds of a broadcast of 1 GiB in the group of the stream."""
    group, found = way._open.group, []
    data = torch.zeros(GIB if not CPU else GIB // 8, dtype=torch.uint8, device=group.device)
    for _ in range(6):
        asked = threading.Thread(target=peer.ask, args=({"broadcast": data.numel()},))
        asked.start()
        time.sleep(0.05)  # the receiver waits
        began = time.monotonic()
        group.broadcast(data, began + 60)
        found.append((time.monotonic() - began) * GIB / data.numel())
        asked.join()
    return median(found[1:])


@on_two
def test_a_receiver_that_dies_ends_the_stream(tmp_path):
    source, way = Source("tiny", "cpu" if CPU else "cuda:0"), Nccl()
    peer = Peer(tmp_path, source, way)
    way.drive(peer)
    peer.more = {"die": True}
    began = time.monotonic()
    with pytest.raises(SyncError, match="the peer is gone"):
        way.drive(peer)
    print(f"ended after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 10
    again = Peer(tmp_path, source, way)
    again.more = {"digests": True}
    try:
        assert way.drive(again).digests == again.answer["digests"]
    finally:
        again.process.kill()


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    """A trainer on the first GPU, a real vLLM on the second."""
    folder = tmp_path_factory.mktemp("nccl")
    make_checkpoint(folder / "hf", head_dim=64)
    make_prompts(folder / "train.jsonl", 16)
    flags = "--weight-sync nccl --rollout-backend vllm --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    flags += "" if CPU else " --precision bf16 --vllm-gpu-memory-utilization 0.1 --vllm-enforce-eager"
    flags += "" if CPU else " --vllm-kv-cache-memory-bytes 1073741824"
    words = grpo_arguments(folder, folder / "run", *flags.split(), "--device", "cpu" if CPU else "cuda")
    with Controller(parse(words[1:], "train"), title="nccl") as controller:
        yield controller


@on_two
def test_the_engine_holds_what_a_checkpoint_would_have_brought(controller):
    deployment = controller.deployment
    sync, engine = deployment._sync, deployment.engines[0]
    tokens = list(range(5, 45))
    for _ in range(4):
        result = sync.run([engine])
        found = result.proven
        print(f"probe {found.last.rms:.2e} of {found.tolerance:.2e}, {result.seconds:.3f} s, {result.parts}")
    ours = engine.prompt_log_probs(tokens, timeout=60)
    sync.run([engine], "disk")
    assert engine.prompt_log_probs(tokens, timeout=60) == ours


@on_two
def test_an_engine_that_dies_in_a_sync_is_noticed(controller, monkeypatch):
    deployment = controller.deployment
    engine, update = deployment.engines[0], Engine.update

    def killed(self, info, *, timeout):
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            process.kill()
        return update(self, info, timeout=timeout)

    monkeypatch.setattr(Engine, "update", killed)
    began = time.monotonic()
    with pytest.raises(InstepError, match="no engine is left"):
        deployment._sync.run([engine])
    print(f"noticed after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 10

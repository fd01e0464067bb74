"""The way `nccl` (gloo on a CPU) with real workers and engines: proven, and not held up by an engine that dies."""

import time

import psutil
import pytest

from instep.arguments import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import EngineGone
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.training import lr_schedule
from tests.e2e.commands import grpo_arguments, on_vllm, run, sync_folder
from tests.e2e.test_engines import nothing_lost, two_engines


class Stack:
    """Two ranks that share the weights, and two embedded engines whose own checkpoint is stale."""

    def __init__(self, tiny, folder):
        from tests.assets import make_checkpoint

        more = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--weight-sync", "nccl"]
        args = parse(grpo_arguments(tiny, folder, *more)[1:], "train")
        args = args.replace(
            device="cpu", precision="fp32", rollout_backend="embedded", update_weight_buffer_size=100_000
        )
        self.workers = WorkerGroup("actor", 2, folder / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        stale = args.replace(hf_checkpoint=str(make_checkpoint(folder / "stale", seed=7)))
        plan = plan_engines(stale)
        self.engines = [start_engine(stale, spec, num_threads=1, log_dir=folder / "logs") for spec in plan]
        setup = [(args, rank, 2, str(folder / "rendezvous"), 1) for rank in range(2)]
        layout = self.workers.call("setup", per_rank=setup, timeout=120)
        self.actor = RoleTrainer(args, self.workers, layout, lr_schedule.from_args(args, 1))
        self.actor.load_weights(tiny / "hf")
        for engine in self.engines:
            engine.wait_ready(120)
        self.syncs = WeightSync(args, self.actor, "nccl", sync_folder(args), vocab_size=50, max_len=128)

    def close(self):
        self.syncs.close()
        self.workers.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def stack(tiny, tmp_path):
    stack = Stack(tiny, tmp_path)
    yield stack
    stack.close()


def test_a_stream_is_proven_and_outlives_an_engine_that_dies_in_it(stack, monkeypatch):
    first = stack.syncs.run(stack.engines)
    assert first.probe_max_abs_diff <= 1e-5 and first.num_bytes > 300_000 and first.engines == stack.engines
    second = stack.syncs.run(stack.engines)
    assert second.num_bytes == first.num_bytes and second.seconds < first.seconds

    original = Engine.update

    def update(self, info, *, timeout):
        if self is stack.engines[1]:
            psutil.Process(self.process.pid).kill()
        return original(self, info, timeout=timeout)

    monkeypatch.setattr(Engine, "update", update)
    started = time.monotonic()
    third = stack.syncs.run(stack.engines)
    assert time.monotonic() - started < 20 and third.engines == stack.engines[:1]
    assert third.probe_max_abs_diff <= 1e-5 and third.num_tensors == first.num_tensors
    monkeypatch.setattr(Engine, "update", lambda self, info, *, timeout: psutil.Process(self.process.pid).kill())
    with pytest.raises(EngineGone, match="no engine is left"):
        stack.syncs.run(stack.engines[:1])


@pytest.mark.vllm
def test_runs_on_vllm(small, tmp_path):
    done = run([*two_engines(small, tmp_path, "vllm", *on_vllm(2)), "--weight-sync", "nccl"], 400)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = nothing_lost(tmp_path)
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5

"""The ways `nccl` (gloo on a CPU) and `ipc`, with real workers and engines: proven, and no death holds them up."""

import time

import psutil
import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import EngineGone, Session
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.training import lr_schedule
from tests.bounds import allowed
from tests.e2e.commands import grpo_arguments, on_vllm, run, sync_folder
from tests.e2e.test_engines import nothing_lost, two_engines
from tests.e2e.test_families import train_once


class Stack:
    """Two ranks that share the weights, and two engines (or what `flags` say) whose own checkpoint is stale."""

    def __init__(self, model, folder, way, backend="embedded", flags=()):
        from tests.assets import make_checkpoint

        more = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--weight-sync", way]
        more += [*(on_vllm(2) if backend == "vllm" else []), *flags]
        args = parse(grpo_arguments(model, folder, *more)[1:], "train")
        args = args.replace(device="cpu", precision="fp32", rollout_backend=backend, update_weight_buffer_size=100_000)
        self.workers = WorkerGroup("actor", 2, folder / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        head_dim = 32 if backend == "vllm" else 16
        stale = args.replace(hf_checkpoint=str(make_checkpoint(folder / "stale", seed=7, head_dim=head_dim)))
        self.stale, self.plan, self.logs = stale, plan_engines(stale), folder / "logs"
        self.engines = [start_engine(stale, spec, num_threads=1, log_dir=self.logs) for spec in self.plan]
        setup = [(args, rank, 2, str(folder / "rendezvous"), 1) for rank in range(2)]
        layout = self.workers.call("setup", per_rank=setup, timeout=300)
        self.actor = RoleTrainer(args, self.workers, layout, lr_schedule.from_args(args, 1))
        self.actor.load_weights(model / "hf")
        for engine in self.engines:
            engine.wait_ready(600)
        self.syncs = WeightSync(args, self.actor, way, sync_folder(args), vocab_size=50, max_len=128)

    def restart(self, index):
        engine = self.engines[index]
        engine.stop()
        port = int(engine.url.rpartition(":")[2])
        engine.process = start_engine(self.stale, self.plan[index], num_threads=1, log_dir=self.logs, port=port).process
        engine.wait_ready(120)

    def close(self):
        self.syncs.close()
        self.workers.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(params=["nccl", "ipc"])
def stack(request, tiny, tmp_path):
    stack = Stack(tiny, tmp_path, request.param)
    yield stack
    stack.close()


@pytest.fixture(params=["nccl", "ipc"])
def stack_of_vllm(request, small, tmp_path):
    stack = Stack(small, tmp_path, request.param, "vllm")
    yield stack
    stack.close()


def test_a_stream_is_proven_and_outlives_an_engine_that_dies_in_it(stack, monkeypatch):
    first = stack.syncs.run(stack.engines)
    assert first.proven.last.largest <= 1e-5 and first.num_bytes > 300_000 and first.engines == stack.engines
    second = stack.syncs.run(stack.engines)
    later = [stack.syncs.run(stack.engines).seconds for _ in range(2)]
    assert second.num_bytes == first.num_bytes and min(second.seconds, *later) < first.seconds  # the group is there

    third = run_while_one_dies(stack, monkeypatch)
    assert third.num_tensors == first.num_tensors
    monkeypatch.undo()
    compare_with_disk(stack, stack.engines[1])
    monkeypatch.setattr(Engine, "update", lambda self, info, *, timeout: psutil.Process(self.process.pid).kill())
    with pytest.raises(EngineGone, match="no engine is left"):
        stack.syncs.run(stack.engines[1:])


def compare_with_disk(stack, engine):
    """What the stream has brought is what the golden twin brings: byte for byte, where the engine tells, and scores."""

    def held():
        digests = engine.weight_digests(timeout=30) if stack.stale.rollout_backend == "embedded" else {}
        return digests, engine.prompt_log_probs([5, 6, 7, 8, 9], timeout=60)

    before = held()
    assert stack.syncs.run([engine], "disk").num_bytes > 0 and held() == before


def run_while_one_dies(stack, monkeypatch):
    """The first engine dies in the stream, of which the second one hears: it receives once more."""
    original = Engine.update

    def update(self, info, *, timeout):
        if self is stack.engines[0]:
            psutil.Process(self.process.pid).kill()
        return original(self, info, timeout=timeout)

    monkeypatch.setattr(Engine, "update", update)
    started = time.monotonic()
    result = stack.syncs.run(stack.engines)
    assert time.monotonic() - started < allowed(20) and result.engines == stack.engines[1:]
    assert result.proven.last.largest <= 1e-5
    return result


@pytest.mark.slow
def test_an_engine_of_somebody_elses_that_was_started_anew_gets_a_new_stream(stack, monkeypatch):
    """Nothing but its address is known of it, so that the sender goes on with the stream that it has."""
    monkeypatch.setattr(Session, "receivers", lambda self: ("the same", 2))
    stack.syncs.run(stack.engines)
    weights = stack.engines[1].weight_digests(timeout=30)
    stack.restart(1)
    result = stack.syncs.run(stack.engines)
    assert result.engines == stack.engines and result.proven.last.largest <= 1e-5
    assert stack.engines[1].weight_digests(timeout=30) == weights


@pytest.mark.vllm
@pytest.mark.slow
def test_a_stream_outlives_a_vllm_that_dies_in_it(stack_of_vllm, monkeypatch):
    assert stack_of_vllm.syncs.run(stack_of_vllm.engines).engines == stack_of_vllm.engines
    compare_with_disk(stack_of_vllm, stack_of_vllm.engines[1])
    run_while_one_dies(stack_of_vllm, monkeypatch)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_both_workers_of_an_engine_get_what_disk_brings(small, tmp_path, kind):
    """Each way brings another version; then the same one comes by the golden twin."""
    flags = ["--rollout-num-gpus-per-engine", "2", *([] if kind == "tensor" else [f"--vllm-{kind}-parallel-size", "2"])]
    stack = Stack(small, tmp_path, "nccl", "vllm", flags)
    try:
        (engine,) = stack.engines
        assert engine.kind.num_workers(engine, 60) == 2
        for way in ("nccl", "ipc", "shm", "nccl", "ipc"):
            result = stack.syncs.run([engine], way)
            assert result.proven.last.largest <= 1e-5 and result.num_bytes > 300_000
            compare_with_disk(stack, engine)
            train_once(stack.actor)
    finally:
        stack.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("way", ["nccl", "ipc"])
def test_runs_on_vllm(small, tmp_path, way):
    done = run([*two_engines(small, tmp_path, "vllm", *on_vllm(2)), "--weight-sync", way], 400)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = nothing_lost(tmp_path)
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5
    assert [row["perf/answers_in_arrays"] for row in steps] == [1.0] * len(steps)

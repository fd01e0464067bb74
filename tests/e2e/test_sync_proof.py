"""A sync that goes wrong stops the run with a SyncError that names the tensor; one that goes right is proven.

The corruption happens where it would: between the trainer's manifest and the engine (the shared-memory file, the
control message), while real workers and a real engine run.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import EngineGone, Session
from instep.controller.sync.weight_sync import WeightSync
from instep.data.batch import build_batch
from instep.engines.engine import Engine
from instep.errors import SyncError
from instep.rollout.request_gate import gate
from instep.training import lr_schedule
from instep.types import Sample
from tests.e2e.commands import grpo_arguments, sync_folder


@pytest.fixture(scope="module")
def stack(tiny, tmp_path_factory):
    """One hf worker, one embedded engine whose own checkpoint is stale, and the session between them."""
    from tests.assets import make_checkpoint

    folder = tmp_path_factory.mktemp("stack")
    args = parse(grpo_arguments(tiny, folder)[1:], "train")
    args = args.replace(device="cpu", precision="fp32", rollout_backend="embedded")
    workers = WorkerGroup("actor", 1, folder / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    engine_args = args.replace(hf_checkpoint=str(make_checkpoint(folder / "stale", seed=7)))
    engine = start_engine(engine_args, plan_engines(engine_args)[0], num_threads=1, log_dir=folder / "logs")
    try:
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), 1, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(tiny / "hf")
        engine.wait_ready(120)
        yield args, actor, engine
    finally:
        workers.close()
        engine.stop()


@pytest.fixture
def sync(stack, tmp_path):
    """The syncs of the stack; `run` brings a version to its engine."""
    args, actor, engine = stack
    syncs = WeightSync(args, actor, "shm", sync_folder(args), vocab_size=50, max_len=128)
    syncs.engine_scores = lambda: syncs.proof.engine_scores(engine, Session(args, actor, [engine], 0, tmp_path))
    yield syncs
    syncs.close()


@pytest.mark.parametrize("mode, is_open", [("keep", True), ("abort", False), ("wait", False)])
def test_with_keep_alone_requests_are_admitted_before_the_proof(stack, sync, monkeypatch, mode, is_open):
    """And where the proof fails, the run ends: who trains waits for it."""
    _, _, engine = stack
    seen, prove = [], sync.proof.prove
    sync._args = sync._args.replace(pause_mode=mode)

    def watched(*args):
        seen.append(not gate().closed)
        return prove(*args)

    monkeypatch.setattr(sync.proof, "prove", watched)
    result = sync.run([engine])
    assert seen == [is_open] and not gate().closed
    assert 0 < result.seconds_of["paused"] < result.seconds - result.seconds_of["proof"]
    metrics = result.metrics()
    assert metrics["sync/pause_seconds"] < metrics["sync/session_seconds"] + metrics["sync/proof_seconds"]

    def wrong(*args):
        raise SyncError("the probe differs")

    monkeypatch.setattr(sync.proof, "prove", wrong)
    with pytest.raises(SyncError, match="the probe differs"):
        sync.run([engine])
    assert gate().closed is not is_open


def train_once(workers, lr):
    """One optimizer step on a made-up sample, so that all weights change a little."""
    done = Sample.Status.COMPLETED
    sample = Sample(group_index=0, index=0, tokens=list(range(5, 37)), response_length=24, reward=1.0, status=done)
    batch = build_batch([[sample]])
    batch.token_columns["advantages"] = torch.ones(24)
    batch.token_columns["loss_weights"] = torch.full((24,), 1 / 24)
    metrics = workers.call("train", batch, [[[0]]], [lr], timeout=180)[0][0][0]  # on a GPU, with its compiling
    assert metrics["grad_norm"] > 0 and not metrics["skipped_steps"]


def tamper(monkeypatch, change):
    """Let `change(manifest dict) -> manifest dict` stand between trainer and engine."""
    original = Engine.post

    def post(self, path, body=None, **kwargs):
        if path == "/update_weights" and "manifest" in body["update_info"]:
            body = {"update_info": {**body["update_info"], "manifest": change(body["update_info"]["manifest"])}}
        return original(self, path, body, **kwargs)

    monkeypatch.setattr(Engine, "post", post)


def test_a_stale_checkpoint_of_the_engine_does_not_matter(stack, sync):
    engine = stack[2]
    result = sync.run([engine])
    assert result.version == 1 and result.proven.last.largest <= 1e-5 and result.num_tensors > 10
    again = sync.run([engine])
    assert again.version == 2 and again.proven.last.largest == result.proven.last.largest


def test_the_golden_way_gives_the_same_scores(stack, sync):
    _, actor, engine = stack
    sync.run([engine], "disk")
    golden = sync.engine_scores()
    sync.run([engine], "shm")
    assert sync.engine_scores() == golden
    train_once(actor.workers, 1e-3)
    sync.run([engine], "shm")
    assert sync.engine_scores() != golden


def test_scores_that_are_off_once_are_asked_for_again(stack, sync, monkeypatch):
    engine = stack[2]
    scores = sync.proof.engine_scores
    asked = []

    def off_once(engine, session):
        asked.append(engine)
        return [x + 3e-4 * (len(asked) == 1) for x in scores(engine, session)]

    monkeypatch.setattr(sync.proof, "engine_scores", off_once)
    result = sync.run([engine])
    first, last, _, tolerance = result.proven
    assert len(asked) == 2 and first.largest == pytest.approx(3e-4, rel=0.1) and last.rms <= tolerance < first.rms
    monkeypatch.setattr(sync.proof, "engine_scores", lambda *args: [x + 3e-4 for x in scores(*args)])
    with pytest.raises(SyncError, match=r"compute differently.*by 0.0003 nats in the mean"):
        sync.run([engine])


def test_a_dropped_tensor_is_named(stack, sync, monkeypatch):
    engine = stack[2]
    name = "model.layers.1.mlp.up_proj.weight"
    tamper(monkeypatch, lambda m: {**m, "tensors": [t for t in m["tensors"] if t["name"] != name]})
    with pytest.raises(SyncError, match=name):
        sync.run([engine])


def test_swapped_bytes_are_named(stack, sync, monkeypatch):
    """k and v have the same shape; their bytes change places in the shared memory."""

    engine = stack[2]

    def swap(manifest):
        k, v = (next(t for t in manifest["tensors"] if f"layers.0.self_attn.{x}_proj" in t["name"]) for x in "kv")
        path = Path(manifest["path"])
        data = bytearray(path.read_bytes())
        a, b = (slice(t["offset"], t["offset"] + t["nbytes"]) for t in (k, v))
        data[a], data[b] = data[b], data[a]
        path.write_bytes(data)
        return manifest

    tamper(monkeypatch, swap)
    with pytest.raises(SyncError, match=r"layers\.0\.self_attn\.[kv]_proj\.weight"):
        sync.run([engine])


def test_swapped_names_are_found_by_the_probe_and_named(stack, sync, monkeypatch):
    """Every digest is right here; only the functional probe can see it, and the comparison of digests names both."""

    engine = stack[2]

    def swap(manifest):
        tensors = [dict(t) for t in manifest["tensors"]]
        k, v = (next(t for t in tensors if f"layers.0.self_attn.{x}_proj" in t["name"]) for x in "kv")
        k["name"], v["name"] = v["name"], k["name"]
        return {**manifest, "tensors": tensors}

    tamper(monkeypatch, swap)
    with pytest.raises(SyncError, match="log-probs of the probe differ") as caught:
        sync.run([engine])
    assert "layers.0.self_attn.k_proj.weight" in str(caught.value)
    assert "layers.0.self_attn.v_proj.weight" in str(caught.value)


def test_one_flipped_low_bit_is_named(stack, sync, monkeypatch):
    engine = stack[2]

    def flip(manifest):
        record = next(t for t in manifest["tensors"] if t["name"] == "model.norm.weight")
        with open(manifest["path"], "r+b") as file:
            file.seek(record["offset"])
            byte = file.read(1)[0]
            file.seek(record["offset"])
            file.write(bytes([byte ^ 1]))
        return manifest

    tamper(monkeypatch, flip)
    with pytest.raises(SyncError, match="model.norm.weight"):
        sync.run([engine])


def test_an_old_version_replayed_at_a_tiny_learning_rate_is_named(stack, sync, monkeypatch, tmp_path):
    _, actor, engine = stack
    kept = {}

    def keep(manifest):
        kept["file"] = shutil.copy(manifest["path"], tmp_path / "old.bin")
        return manifest

    with monkeypatch.context() as patch:
        tamper(patch, keep)
        sync.run([engine])
    train_once(actor.workers, 1e-6)

    def replay(manifest):
        shutil.copy(kept["file"], manifest["path"])
        return manifest

    with monkeypatch.context() as patch:
        tamper(patch, replay)
        with pytest.raises(SyncError, match=r"tensor .*model\.|model\.\S+\.weight"):
            sync.run([engine])
    sync.run([engine])  # and a good session afterwards is proven again


def test_an_engine_that_ignores_an_update_is_caught(stack, sync, monkeypatch):
    """All control calls answer 200, but the weights stay: the probe must see it even at learning rate 1e-6."""
    _, actor, engine = stack
    sync.run([engine])
    train_once(actor.workers, 1e-6)
    original = Engine.post

    def post(self, path, body=None, **kwargs):
        quiet = ("/start_weight_update", "/update_weights", "/finish_weight_update")
        return {} if path in quiet else original(self, path, body, **kwargs)

    monkeypatch.setattr(Engine, "post", post)
    with pytest.raises(SyncError) as caught:
        sync.run([engine])
    assert "model." in str(caught.value)


def test_the_deadline_is_kept(stack):
    args, actor, engine = stack
    sync = WeightSync(args.replace(sync_timeout=0.0), actor, "shm", sync_folder(args), vocab_size=50, max_len=128)
    with pytest.raises(SyncError, match="did not end within its time"):
        sync.run([engine])
    sync.close()


def test_an_engine_that_dies_in_a_session_leaves_it(stack, sync, tmp_path, monkeypatch):
    """The other one gets its weights and is proven; the last one's death would be an error."""
    args, _, engine = stack
    victim = start_engine(args, replace(plan_engines(args)[0], index=1), num_threads=1, log_dir=tmp_path)
    victim.wait_ready(120)
    post = Engine.post

    def dies(self, path, body=None, **kwargs):
        if self is victim and path == "/finish_weight_update":
            victim.process.kill()
        return post(self, path, body, **kwargs)

    monkeypatch.setattr(Engine, "post", dies)
    result = sync.run([engine, victim])
    assert result.engines == [engine] and result.proven.last.largest <= 1e-5
    with pytest.raises(EngineGone, match="engine 1 died"):
        sync.run([victim])
    with pytest.raises(EngineGone, match="no engine is left"):
        sync.run([])


def test_an_engine_that_is_started_anew_in_a_session_is_in_none(stack, sync, tmp_path, monkeypatch):
    """While the workers publish, it dies and comes back at its address: it leaves the session, and joins by another."""
    args, actor, engine = stack
    workers = actor.workers
    spec = replace(plan_engines(args)[0], index=1)
    victim = start_engine(args, spec, num_threads=1, log_dir=tmp_path)
    victim.wait_ready(120)
    port = int(victim.url.rpartition(":")[2])
    call, deaths = workers.call, []

    def come_back(method, *given, **options):
        if method == "publish" and not deaths:
            deaths.append(victim.process.pid)
            victim.process.kill()
            victim.process = start_engine(args, spec, num_threads=1, log_dir=tmp_path, port=port).process
        return call(method, *given, **options)

    monkeypatch.setattr(workers, "call", come_back)
    try:
        result = sync.run([engine, victim])
        assert result.engines == [engine] and result.proven.last.largest <= 1e-5 and deaths
        victim.wait_ready(120)
        again = sync.rejoin(victim)
        assert again.proven.last.largest <= 1e-5 and again.engines == [victim]
        deaths.clear()
        with pytest.raises(EngineGone, match="engine 1 "):
            sync.rejoin(victim)
    finally:
        victim.stop()

"""Trainer and engine share one memory: what a step changes is what the engine computes with, and no byte travels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.sync.session import EngineGone
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.errors import SyncError
from instep.system.scratch import Scratch, memory_root
from instep.training import lr_schedule
from instep.weights.memory import EngineMemory, attach, sample_digests
from instep_engine import MEMORY_VARIABLE
from instep_engine.manifest import tensor_digest
from instep_engine.place import SYNC
from tests.assets import make_checkpoint
from tests.e2e.commands import grpo_arguments, on_sglang, on_vllm
from tests.e2e.test_sync_proof import train_once

TOKENS = [40, 41, 42, 43, 44, 45, 46, 47, 30, 31, 32, 5, 6, 7]
NORM = "model.norm.weight"


FLAGS = {"embedded": ["--rollout-backend", "embedded"], "vllm": on_vllm(), "sglang": on_sglang()}


@dataclass
class Pair:
    """One trainer, the engine that shares its weights, and what starts another such engine."""

    args: Args
    actor: RoleTrainer
    engine: Engine
    folder: Path
    logs: Path

    def start(self, port: int | None = None) -> Engine:
        spec, env = plan_engines(self.args)[0], {MEMORY_VARIABLE: str(self.folder)}
        return start_engine(self.args, spec, num_threads=1, log_dir=self.logs, env=env, port=port)

    def memory(self) -> EngineMemory:
        """The engine's memory, as a third process sees it."""
        return attach(self.folder, lock=False)

    def held(self) -> list[dict[str, str]]:
        """The digests of the samples of what each worker's memory holds."""
        workers = self.memory().slices.values()
        return [sample_digests({name: [part.view for part in parts] for name, parts in w.items()}) for w in workers]

    def paused(self) -> bool:
        return bool(get_json(self.engine.url + "/is_paused", 10.0)["is_paused"])

    def scores(self) -> torch.Tensor:
        return torch.tensor(self.engine.prompt_log_probs(TOKENS, timeout=60))

    def step(self, lr: float = 1e-3) -> None:
        train_once(self.actor.workers, lr)

    def exported_scores(self, folder: Path, dtype: torch.dtype) -> torch.Tensor:
        """What a model from transformers says that has loaded the trainer's export."""
        self.actor.export_hf(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.no_grad():
            rows = model(torch.tensor([TOKENS])).logits[0, :-1].float().log_softmax(-1)
        return rows.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def pairs(
    root: Path, kind: str, precision: str, num_ranks: int = 1, *more: str, env: Mapping[str, str] | None = None
) -> Iterator[Pair]:
    """`env`: more of the workers'."""
    checkpoint = make_checkpoint(root / "hf", head_dim=32)
    flags = [*FLAGS[kind], "--actor-num-gpus-per-node", str(num_ranks), "--weight-sync", "single-copy", *more]
    shutil.copy(Path(__file__).parents[1] / "assets.py", root / "train.jsonl")  # no row of it is read
    args = parse(grpo_arguments(root, root / "run", *flags)[1:], "train")
    args = args.replace(device="cpu", precision=precision, rollout_backend=kind)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    workers = WorkerGroup("actor", num_ranks, root / "logs", env)
    scratch = Scratch(f"{SYNC}test-", memory_root())
    stale = args.replace(hf_checkpoint=str(make_checkpoint(root / "stale", seed=7, head_dim=32)))
    pair = Pair(stale, None, None, scratch.path, root / "logs")  # type: ignore[arg-type]
    engine = pair.start()
    try:
        per_rank = [(args, rank, num_ranks, str(root / "rendezvous"), 1) for rank in range(num_ranks)]
        layout = workers.call("setup", per_rank=per_rank, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 1))
        actor.load_weights(checkpoint)
        engine.wait_ready(240)
        pair.actor, pair.engine = actor, engine
        yield pair
    finally:
        workers.close()
        (pair.engine or engine).stop()
        scratch.remove()


VLLM = pytest.mark.vllm
SLOW = [VLLM, pytest.mark.slow]
SGLANG = [pytest.mark.sglang, pytest.mark.slow]
KINDS = [
    "embedded fp32",
    pytest.param("embedded bf16", marks=pytest.mark.slow),
    pytest.param("embedded bf16 2", marks=pytest.mark.slow),  # ranks of the trainer
    pytest.param("embedded fp32 2", marks=pytest.mark.slow),
    pytest.param("embedded bf16 2 megatron", marks=pytest.mark.slow),  # which keeps its own parameters
    pytest.param("vllm fp32", marks=VLLM),
    pytest.param("vllm bf16", marks=SLOW),
    pytest.param("sglang fp32", marks=SGLANG),
    pytest.param("sglang bf16", marks=SGLANG),
]


@pytest.fixture(scope="module", params=KINDS)
def shared(request, tmp_path_factory) -> Iterator[Pair]:
    kind, precision, num_ranks, backend = [*request.param.split(), *["1", "hf"][len(request.param.split()) - 2 :]]
    root = tmp_path_factory.mktemp("shared")
    yield from pairs(root, kind, precision, int(num_ranks), "--train-backend", backend)


@pytest.fixture
def sync(shared: Pair) -> Iterator[WeightSync]:
    yield from synced(shared)


def synced(pair: Pair) -> Iterator[WeightSync]:
    sync = WeightSync(pair.args, pair.actor, "single-copy", pair.folder, vocab_size=50, max_len=128)
    yield sync
    sync.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies of what engines are asked."""
    bodies, post = [], Engine._post

    def kept(self: Engine, path: str, body: dict[str, Any] | None, *options: Any) -> dict[str, Any]:
        bodies.append(body or {})
        return post(self, path, body, *options)

    monkeypatch.setattr(Engine, "_post", kept)
    return bodies


def test_what_a_step_changes_is_what_the_engine_computes_with(
    shared: Pair, sync: WeightSync, told: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Against the golden twin: transformers with the trainer's export, whose log-probs in float32 differ by 1e-5."""
    full = shared.args.precision == "fp32"
    for number in range(3):
        before = shared.scores()
        sync.hold([shared.engine])
        shared.step()
        told.clear()
        result = sync.run([shared.engine])
        assert result.num_bytes == 0 and result.num_tensors > 20 and result.version == number + 1
        updates = [body["update_info"]["backend"] for body in told if "update_info" in body]
        size = sum(part.view.nbytes for w in shared.memory().slices.values() for parts in w.values() for part in parts)
        calibrates = set() if full else {"disk"}  # the proof compares with it when bf16 differs by more than before
        first = {"memory"} if number == 0 else set()  # the engine knows it as its own, before the first write
        assert {"single-copy"} <= {*updates} <= {"single-copy", "complete", *calibrates, *first}
        assert len(json.dumps(told)) < size / 20
        dtype = torch.float32 if full else torch.bfloat16
        after, twin = shared.scores(), shared.exported_scores(tmp_path / str(number), dtype)
        assert not torch.equal(before, after)
        assert (after - twin).abs().max() <= (1e-5 if full else 5e-2)
        held = shared.memory()
        ours = shared.actor.weight_digests("disk", 60)
        assert {n: tensor_digest(held.whole(n)) for n in held.shapes} == ours and len(ours) == result.num_tensors


def test_the_golden_twin_is_compared_and_nothing_is_loaded(shared: Pair, sync: WeightSync) -> None:
    sync.run([shared.engine])
    scores = shared.scores()
    assert sync.run([shared.engine], "disk").num_bytes > 0 and torch.equal(shared.scores(), scores)
    assert attach(shared.folder, lock=False).nonces == shared.memory().nonces
    for way in ("shm", "ipc"):
        with pytest.raises(SyncError, match="this engine shares its memory: it loads no buckets"):
            sync.run([shared.engine], way)
    sync.run([shared.engine])


def test_a_write_into_the_memory_is_seen_by_engine_and_trainer(shared: Pair, sync: WeightSync) -> None:
    """Bit for bit, and without a session: it is their own memory."""
    sync.run([shared.engine])
    memory, scores = shared.memory(), shared.scores()
    view = memory.whole(NORM)
    assert view is not None
    kept = view.clone()
    view.mul_(1.5)
    shared.engine.reset_cache(timeout=60)
    assert (shared.scores() - scores).abs().max() > 1e-2
    if shared.args.precision == "fp32" and shared.args.world_size == 1:  # there the parameters are the masters, too
        assert shared.actor.weight_digests("disk", 60)[NORM] == tensor_digest(view)
    view.copy_(kept)
    shared.engine.reset_cache(timeout=60)
    assert torch.equal(shared.scores(), scores)
    sync.run([shared.engine])


def test_no_session_and_no_checkpoint_takes_wrong_memory_for_right(shared: Pair, sync: WeightSync, monkeypatch) -> None:
    """What changes in the memory after the trainer's write, and before the engine compares, is named."""
    sync.run([shared.engine])
    view, post = shared.memory().whole("model.layers.1.mlp.down_proj.weight"), Engine.post
    assert view is not None
    kept = view.clone()

    def spoil(self, path, body=None, **options):
        if path == "/update_weights" and body["update_info"]["backend"] != "complete":
            view[0, 0] += 1.0
        return post(self, path, body, **options)

    for way in ("single-copy", "disk"):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "post", spoil)
            with pytest.raises(SyncError, match=r"model\.layers\.1\.mlp\.down_proj\.weight") as caught:
                sync.run([shared.engine], way)
        assert shared.engine.name in str(caught.value)
        view.copy_(kept)
    sync.run([shared.engine])


def test_the_engine_is_held_while_the_trainer_writes(shared: Pair, sync: WeightSync) -> None:
    """And can be asked again when the gap forbids the first step: nothing has been written then."""
    sync.run([shared.engine])
    for _ in range(2):
        sync.hold([shared.engine])
        assert shared.paused()
        before = shared.held()
        accused = sync.accuse([shared.engine], SyncError("a gap"), "rollout 3")
        assert "version 1 is what each engine holds now" in accused.what and shared.held() == before
    sync.hold([shared.engine])
    shared.step()
    sync.run([shared.engine])
    assert not shared.paused() and shared.held() != before


def test_a_second_trainer_is_refused(shared: Pair, sync: WeightSync) -> None:
    sync.run([shared.engine])
    with pytest.raises(SyncError, match=f"another trainer is attached to the weights of {shared.engine.name}"):
        attach(shared.folder, lock=True)


@pytest.mark.parametrize("shared", ["embedded fp32", pytest.param("vllm fp32", marks=VLLM)], indirect=True)
def test_the_memory_of_another_server_is_not_written(shared: Pair, sync: WeightSync, tmp_path: Path) -> None:
    """As when a bridge file of server B lies where the trainer of server A looks for its own."""
    sync.run([shared.engine])
    before = shared.held()
    with Scratch(f"{SYNC}test-", memory_root()) as folder:
        args, env = shared.args.replace(rollout_backend="embedded", vllm_overrides={}), {MEMORY_VARIABLE: str(folder)}
        stale = args.replace(hf_checkpoint=str(shared.logs.parent / "stale"))
        other = start_engine(stale, plan_engines(stale)[0], num_threads=1, log_dir=tmp_path, env=env)
        try:
            other.wait_ready(120)
            (weights,) = attach(folder, lock=False).slices.values()
            kept = {name: parts[0].view.clone() for name, parts in weights.items()}
            strayed = WeightSync(shared.args, shared.actor, "single-copy", folder, vocab_size=50, max_len=128)
            with pytest.raises(SyncError, match="other memory than this engine's; nothing was written") as caught:
                strayed.run([shared.engine])
            assert all(torch.equal(parts[0].view, kept[name]) for name, parts in weights.items())
        finally:
            other.stop()
    message = str(caught.value)
    assert shared.engine.name in message and str(folder) in message and "--vllm-config-path" in message
    assert not shared.paused() and shared.held() == before and len(shared.scores()) == len(TOKENS) - 1
    sync.run([shared.engine])


@pytest.mark.parametrize("shared", ["embedded fp32", pytest.param("vllm bf16", marks=SLOW)], indirect=True)
def test_an_engine_that_is_started_anew_shares_new_memory(shared: Pair, sync: WeightSync) -> None:
    """The trainer's weights outlive the engine, and move into the memory of the next one."""
    sync.hold([shared.engine])
    shared.step()
    sync.run([shared.engine])
    scores, weights = shared.scores(), shared.actor.weight_digests("disk", 60)
    old = shared.memory().nonces
    shared.engine.process.kill()
    with pytest.raises(EngineGone):
        sync.run([shared.engine])
    assert shared.actor.weight_digests("disk", 60) == weights  # the file stays mapped
    with pytest.raises(SyncError, match="has ended"):
        shared.memory()
    shared.engine.process = shared.start(int(shared.engine.url.rpartition(":")[2])).process
    shared.engine.wait_ready(240)
    assert shared.memory().nonces != old
    result = sync.rejoin(shared.engine)
    assert result.num_bytes == 0 and torch.equal(shared.scores(), scores)
    assert shared.actor.weight_digests("disk", 60) == weights


SHARDS = [("vllm", "fp32", 1), ("vllm", "bf16", 1), ("vllm", "fp32", 2), ("vllm", "bf16", 2), ("sglang", "fp32", 2)]


@pytest.mark.parametrize(
    ("kind", "precision", "num_ranks"),
    [pytest.param(*each, marks=SLOW if each[0] == "vllm" else SGLANG) for each in SHARDS],
)
def test_the_shards_of_two_workers_follow_the_trainer(
    tmp_path: Path, kind: str, precision: str, num_ranks: int
) -> None:
    """One rank of the trainer writes each weight's slices into both workers' memory; of two with TP each views its own.

    The views are shown by a third process, which changes a row of each worker's part of a query projection.
    """
    more = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--tensor-model-parallel-size"]
    for pair in pairs(tmp_path, kind, precision, num_ranks, *more, str(num_ranks)):
        for sync in synced(pair):
            for number in range(2):
                sync.hold([pair.engine])
                pair.step()
                assert sync.run([pair.engine]).num_bytes == 0
                dtype = torch.float32 if precision == "fp32" else torch.bfloat16
                scores, twin = pair.scores(), pair.exported_scores(tmp_path / str(number), dtype)
                assert (scores - twin).abs().max() <= (1e-5 if precision == "fp32" else 5e-2)
                assert len(pair.memory().slices) == 2 and pair.memory().whole(NORM) is None
            sync.run([pair.engine], "disk")  # every byte
            session = sync._session([pair.engine])
            before = sync.proof._trainer_scores(session).plain
            for worker in pair.memory().slices.values():
                worker["model.layers.0.self_attn.q_proj.weight"][0].view[0].fill_(1.0)
            pair.engine.reset_cache(timeout=60)
            ours, theirs = sync.proof._trainer_scores(session).plain, sync.proof.engine_scores(pair.engine, session)
            moved, gap = (max(abs(a - b) for a, b in zip(ours, other, strict=True)) for other in (before, theirs))
            if num_ranks == 1:
                assert moved == 0
            else:
                assert moved > 1e-2 and gap <= (1e-4 if precision == "fp32" else 5e-2)

"""Weights that somebody else loads between two syncs are seen in the log-probs of the next rollout: nothing is trained.

The engine and the worker are real; the foreign weights come over the engine's own routes.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.wire import GENERATE, VLLM_WIRE, GenerationRequest
from instep.errors import SyncError
from instep.training import lr_schedule
from instep.types import Sample
from tests.assets import make_checkpoint
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, run, sync_folder

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def stack(tiny, tmp_path_factory):
    """Arguments, one hf worker and one embedded engine."""
    folder = tmp_path_factory.mktemp("stack")
    args = parse(grpo_arguments(tiny, folder)[1:], "train")
    args = args.replace(device="cpu", precision="fp32", rollout_backend="embedded")
    workers = WorkerGroup("actor", 1, folder / "logs", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=folder / "logs")
    try:
        layout = workers.call("setup", args, 0, 1, str(folder / "rendezvous"), 1, timeout=300)
        actor = RoleTrainer(args, workers, layout, lr_schedule.from_args(args, 100))
        engine.wait_ready(120)
        yield args, actor, engine, make_checkpoint(folder / "other", seed=7)
    finally:
        workers.close()
        engine.stop()


@pytest.fixture
def synced(stack, tiny):
    """A sync of version 4, after which trainer and engine hold the same weights."""
    args, actor, engine, _ = stack
    actor.load_weights(tiny / "hf")
    sync = WeightSync(args, actor, "shm", sync_folder(args), vocab_size=50, max_len=128)
    sync.version = 3
    sync.run([engine])
    yield sync
    sync.close()


def load_foreign(stack, tiny):
    """What another trainer does that takes the engine for its own, and says that it is of the same version."""
    args, actor, engine, other = stack
    actor.load_weights(other)
    foreign = WeightSync(args, actor, "shm", sync_folder(args), vocab_size=50, max_len=128)
    foreign.version = 3
    foreign.run([engine])
    foreign.close()
    actor.load_weights(tiny / "hf")


def rollout(stack, version=None, **params):
    """Two groups of two samples that the engine makes; `version` takes the place of the engine's own."""
    args, _, engine, _ = stack

    async def send(payload):
        return engine.post(GENERATE, payload, timeout=60), None

    groups = []
    for g in range(2):
        asked = {"max_tokens": 12, "seed": g, **params}
        request = GenerationRequest(engine.url, args.hf_checkpoint, PROMPT, asked, None)
        group = []
        for i, made in enumerate(asyncio.run(VLLM_WIRE.complete_n(request, 2, send))):
            sample = Sample(group_index=g, index=2 * g + i, tokens=list(PROMPT), reward=float(i))
            sample.append_response_tokens(made.token_ids, made.log_probs, weight_versions=made.weight_versions)
            sample.sampling_params, sample.status = asked, Sample.Status.COMPLETED
            for span in sample.weight_versions:
                span.version = version or span.version
            group.append(sample)
        groups.append(group)
    return groups


def train(stack, sync, groups, steps=1):
    args, actor, _, _ = stack
    actor.args = args = args.replace(global_batch_size=4 // steps)
    return TrainingRound(args, args.view({}), actor).run(
        groups, 0, version=sync.version, gap_limit=sync.proof.gap_limit
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_foreign_weights_are_not_trained_on(stack, synced, tiny, steps):
    """With one step the gap is measured in its forward pass, with two in the scoring before them."""
    _, actor, engine, _ = stack
    before = actor.weight_digests("shm", 60)
    load_foreign(stack, tiny)
    groups = rollout(stack)
    assert {span.version for group in groups for s in group for span in s.weight_versions} == {"4"}
    with pytest.raises(
        SyncError, match=r"differ from the trainer's by [\d.]+ nats in the mean, more than 0.001"
    ) as caught:
        train(stack, synced, groups, steps)
    assert actor.weight_digests("shm", 60) == before
    error = synced.accuse([engine], caught.value, "rollout 3")
    assert "version 4 is not what these engines hold any more: engine 0" in error.what and engine.url in error.what
    assert error.where == "rollout 3" and "the step was not trained" in error.what


def test_right_weights_are_trained_on(stack, synced):
    _, actor, engine, _ = stack
    before = actor.weight_digests("shm", 60)
    out = train(stack, synced, rollout(stack))
    assert out.steps[0]["log_prob_gap_max"] < 1e-4 and synced.proof.gap_limit == pytest.approx(1e-3)
    assert actor.weight_digests("shm", 60) != before


def test_tokens_of_older_versions_and_of_another_distribution_are_not_judged(stack, synced, tiny):
    _, _, engine, _ = stack
    load_foreign(stack, tiny)
    older = train(stack, synced, rollout(stack, version="3")).steps[0]
    assert older["log_prob_gap_coverage"] == 0 and older["skipped_steps"] == 0
    with pytest.raises(SyncError, match="was not trained"):  # of a version that no sync has brought
        train(stack, synced, rollout(stack, version="somebody's"))
    assert train(stack, synced, rollout(stack, top_k=3)).steps[0]["log_prob_gap_mean"] > 0.01
    with pytest.raises(SyncError, match="was not trained"):
        train(stack, synced, rollout(stack, top_k=-1))


LIES = """
from instep.rollout.vllm_rollout import generate as honest

async def generate(args, sample, sampling_params):
    sample = await honest(args, sample, sampling_params)
    sample.rollout_log_probs = [x - 0.5 for x in sample.rollout_log_probs]
    return sample
"""


def run_that_lies(tiny, folder, monkeypatch, *flags):
    """A run whose generate function records something else than the engine's log-probs; the engine itself is right."""
    (folder / "lies.py").write_text(LIES)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{Path.cwd()}:{folder}")
    words = ["--custom-generate-function-path", "lies.generate", "--num-rollout", "1", *flags]
    return run(grpo_arguments(tiny, folder, *words))


def test_a_run_with_other_log_probs_ends_before_its_step(tiny, tmp_path, monkeypatch):
    done = run_that_lies(tiny, tmp_path, monkeypatch)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for text in (
        "SyncError: ",
        "by 0.5 nats in the mean",
        "version 1 is what each engine holds now (engine 0",
        "rollout 0",
    ):
        assert text in done.stderr, done.stderr
    assert not (tmp_path / "metrics.jsonl").read_text().count("train/")


@pytest.mark.slow
def test_with_on_gap_warn_a_run_goes_on(tiny, tmp_path, monkeypatch):
    done = run_that_lies(tiny, tmp_path, monkeypatch, "--on-gap", "warn")
    assert done.returncode == 0, done.stderr
    assert "the log-prob gap of rollout 0 is 0.5 nats, more than 0.001" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/log_prob_gap_mean"] == pytest.approx(0.5, abs=1e-4)

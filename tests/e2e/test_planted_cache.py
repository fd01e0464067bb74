"""An engine that keeps its KV cache over a sync is found before a token that it makes with it reaches a loss.

Requests go on under the new weights (`--pause-mode keep`), with a cache that the engine has to compute anew. An engine
that says of itself that it has not dropped the former one ends the sync; one that lies is told by its log-probs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from instep.controller.round import TrainingRound
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.engines.sglang import KIND
from instep.engines.wire import GenerationRequest
from instep.errors import SyncError
from instep.rollout.request_gate import gate
from instep.system.processes import in_thread
from instep.types import Sample
from instep.weights.way import SINGLE_COPY
from tests.bounds import allowed, until
from tests.e2e.commands import on_sglang, on_vllm
from tests.e2e.test_planted import SECONDS, Stack, make_stack
from tests.e2e.test_sync_proof import train_once

PROMPT, NUM_TOKENS = [5, 6, 7], 900
FLAGS = ["--pause-mode", "keep", "--n-samples-per-prompt", "2", "--rollout-batch-size", "1"]


VLLM = [pytest.mark.vllm, pytest.mark.slow]
CASES = [
    pytest.param("embedded", "shm", id="embedded-shm"),
    *[pytest.param("embedded", way, id=f"embedded-{way}", marks=pytest.mark.slow) for way in ("disk", "nccl", "ipc")],
    pytest.param("embedded single-copy", "single-copy", id="embedded-single-copy", marks=pytest.mark.slow),
    pytest.param("vllm", "shm", id="vllm-shm", marks=VLLM),
    pytest.param("sglang", "shm", id="sglang-shm", marks=[pytest.mark.sglang, pytest.mark.slow]),
]
FLAGS_OF = {"embedded": ["--rollout-backend", "embedded"], "vllm": on_vllm(), "sglang": on_sglang()}
pytestmark = pytest.mark.parametrize("stack,way", CASES, indirect=["stack"], scope="module")


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, long: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    kind, *way = request.param.split()
    if kind == "sglang" and not KIND.capabilities.version_spans:
        pytest.skip("SGLang from 0.5.19 on")
    flags = [*FLAGS_OF[kind], *(["--weight-sync", *way] if way else [])]  # how the engine starts
    yield from make_stack(tmp_path_factory.mktemp("cache"), long, *flags, *FLAGS, head_dim=32, max_len=1024)


@pytest.fixture
def sync(stack: Stack, way: str) -> Iterator[WeightSync]:
    """A proven sync."""
    made = stack.sync(way)
    made.run([stack.engine])
    yield made
    made.close()
    stack.engine.resume(timeout=30)


def keeps_its_cache(patch: pytest.MonkeyPatch, lies: bool) -> None:
    def pause(self: Engine, mode: str, *, timeout: float) -> None:
        self.post("/pause", timeout=timeout, mode=mode, clear_cache="false")

    patch.setattr(Engine, "pause", pause)
    if lies:
        patch.setattr(Engine, "reset_cache", lambda self, *, timeout: None)


def step(stack: Stack, sync: WeightSync) -> Future[list[Sample]]:
    """A step of the trainer; returns two responses under way, held meanwhile by an engine of its memory."""
    if sync.way == SINGLE_COPY:
        under_way = sampled(stack)
        sync.hold([stack.engine])
    train_once(stack.actor.workers, 1e-2)
    return under_way if sync.way == SINGLE_COPY else sampled(stack)


def sampled(stack: Stack) -> Future[list[Sample]]:
    """Two responses that are under way when this returns."""
    asked = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 0}
    (model,) = get_json(stack.engine.url + "/v1/models", 10.0)["data"]
    wire = stack.engine.kind.wire
    request = GenerationRequest(stack.engine.url, model["id"], PROMPT, asked)

    async def send(payload: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return stack.engine.post(wire.generate_route, payload, timeout=120), None

    def ask() -> list[Sample]:
        samples = []
        for i, made in enumerate(asyncio.run(wire.complete_n(request, 2, send))):
            sample = Sample(group_index=0, index=i, tokens=list(PROMPT), reward=float(i), sampling_params=asked)
            sample.append_response_tokens(made.token_ids, made.log_probs, weight_versions=made.weight_versions)
            sample.status = Sample.Status.COMPLETED
            samples.append(sample)
        return samples

    under_way = in_thread(ask, "requests")
    until(lambda: not stack.engine.post("/reset_prefix_cache", timeout=30)["success"])  # one that is in use
    time.sleep(0.2)
    return under_way


def train(stack: Stack, sync: WeightSync, samples: list[Sample]) -> dict[str, float]:
    """What a round on these samples says of its step, the sync being the last one."""
    counts = [len(sample.weight_versions) for sample in samples]
    assert counts == [2, 2] and samples[0].weight_versions[1].version == str(sync.version), samples
    stack.actor.args = args = stack.args.replace(global_batch_size=2)
    done = TrainingRound(args, args.view({}), stack.actor).run([samples], 0, version=2, gap_limit=sync.proof.gap_limit)
    return done.steps[0]


def test_a_cache_that_is_computed_anew_is_trained_on(stack: Stack, sync: WeightSync) -> None:
    under_way = step(stack, sync)
    sync.run([stack.engine])
    assert train(stack, sync, under_way.result(120))["log_prob_gap_fresh"] < 1e-4


def test_an_old_cache_is_named_in_the_sync(stack: Stack, sync: WeightSync, monkeypatch: pytest.MonkeyPatch) -> None:
    if stack.engine.kind.name == "sglang":
        pytest.skip("its cache can be dropped while it holds requests")
    keeps_its_cache(monkeypatch, lies=False)
    under_way = step(stack, sync)
    began = time.monotonic()
    with pytest.raises(SyncError, match=f"{stack.engine.name} keeps cached keys and values of old") as caught:
        sync.run([stack.engine])
    assert (
        time.monotonic() - began < allowed(SECONDS) and caught.value.where == stack.engine.url and caught.value.remedy
    )
    assert gate().closed and not under_way.done()  # no client gets a token of it
    stack.engine.abort_requests(timeout=30)
    under_way.result(30)


def test_an_old_cache_that_is_denied_is_not_trained_on(
    stack: Stack, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passes, as its tokens are not in the cache; the log-probs of those that follow it do not."""
    keeps_its_cache(monkeypatch, lies=True)
    under_way = step(stack, sync)
    sync.run([stack.engine])
    before, samples = stack.actor.weight_digests("shm", 60), under_way.result(120)
    began = time.monotonic()
    with pytest.raises(SyncError, match="the step was not trained") as caught:
        train(stack, sync, samples)
    assert time.monotonic() - began < allowed(SECONDS)
    assert stack.actor.weight_digests("shm", 60) == before
    accused = sync.accuse([stack.engine], caught.value, "rollout 1")
    assert f"{stack.engine.name} at {stack.engine.url}" in accused.what
    assert "keep cache entries of earlier weights" in accused.remedy

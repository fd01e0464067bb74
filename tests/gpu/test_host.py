"""The controller's side of a run on a GPU that trainer and vLLM share: what is sent at once, and the first session."""

import math
import os

import pytest
import torch

from instep.arguments.parse import parse
from instep.controller.controller import Controller
from instep.controller.sync.session import Session
from instep.rollout.request_gate import gate
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments

pytestmark = pytest.mark.gpu
CPU = bool(os.environ.get("INSTEP_TEST_ON_CPU"))  # tries it without a GPU
KV_BYTES = 1 << 28


@pytest.mark.skipif(not torch.cuda.is_available() and not CPU, reason="needs a GPU")
@pytest.mark.parametrize("more", ["--offload", "--no-offload-train --no-offload-rollout"][: 1 if CPU else 2])
def test_the_first_session_loads_nothing_twice_and_rollouts_know_the_cache(tmp_path, monkeypatch, more):
    make_checkpoint(tmp_path / "hf", head_dim=64)
    make_prompts(tmp_path / "train.jsonl", 16)
    flags = f"--rollout-backend vllm --precision bf16 --vllm-kv-cache-memory-bytes {KV_BYTES}"
    flags += " --device cpu" if CPU else f" --device cuda --colocate --vllm-gpu-memory-utilization 0.1 {more}"
    words = grpo_arguments(tmp_path, tmp_path / "run", "--num-rollout", "1", *flags.split())
    ways, transfer = [], Session.transfer
    monkeypatch.setattr(Session, "transfer", lambda self, way: (ways.append(way), transfer(self, way))[1])
    with Controller(parse(words[1:], "train"), title="host") as controller:
        assert 0 < gate().num_cached_tokens < math.inf
        controller.sync_weights()
        assert len(ways) == 1 and ways != ["disk"], ways
        rollout = controller.generate(0)
        assert len(rollout.groups) == 4 and all(len(group) == 4 for group in rollout.groups)
        trained = controller.train(rollout)
        assert trained is not None and trained.metrics["train/log_prob_gap_mean"] < 0.1
        print(f"{gate().num_cached_tokens:,.0f} tokens of cache; sync {controller.totals.last_sync}")

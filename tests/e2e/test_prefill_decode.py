"""Prefill and decode on engines of their own. NIXL (vLLM) or Mooncake (SGLang) hands on the KV cache of each prompt."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from tests.assets import make_checkpoint
from tests.e2e.commands import grpo_arguments, on_sglang, on_vllm, run
from tests.e2e.test_engines import kill_one, nothing_lost, two_engines
from tests.e2e.test_pause_modes import numbers_of_versions, train

ON = {"vllm": on_vllm, "sglang": on_sglang}
# Mooncake also needs libibverbs, which no package of Python brings.
PACKAGES = {"vllm": "nixl", "sglang": "mooncake.engine"}


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ON])
def backend(request):
    pytest.importorskip(PACKAGES[request.param], exc_type=ImportError)
    return request.param


def apart(backend, num_engines, num_prefill):
    if torch.cuda.is_available() and torch.cuda.device_count() < num_engines:
        pytest.skip(f"{num_engines} engines need a GPU each")
    more = ["--sglang-enable-metrics"] if backend == "sglang" else []
    return [*ON[backend](num_engines), "--prefill-num-servers", str(num_prefill), *more]


@pytest.mark.slow
def test_every_response_begins_with_the_cache_of_a_prefill_engine(backend, small, tmp_path):
    """Its tokens have the trainer's log-probs, before and after updates.

    A transfer may fail on a busy machine; its request is then asked for again, so that each sample still has one.
    """
    hook = ["--custom-rm-path", "tests.e2e.topology_hooks.reward_that_looks_at_transfers", "--no-hook-trial"]
    done = run([*two_engines(small, tmp_path, backend, *apart(backend, 2, 1)), *hook], 400)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = nothing_lost(tmp_path)
    assert max(row["train/log_prob_gap_max"] for row in steps) < 1e-5
    seen = [json.loads(line) for line in (tmp_path / "transfers.jsonl").read_text().splitlines()]
    assert len(seen) == 16 * len(steps)
    assert max(s["transfers"] for s in seen) >= 16 * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 2])
def test_a_killed_one_costs_no_sample(backend, small, tmp_path, num_prefill):
    """Engine 1 of 3 is one of two that decode, or one of two that prefill."""
    steps = kill_one(tmp_path, two_engines(small, tmp_path, backend, *apart(backend, 3, num_prefill)))
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.slow
def test_responses_across_weight_syncs(backend, long):
    """Of an aborted response the rest is of the next version, with keys and values that are computed again."""
    assert len(numbers_of_versions(long, "abort", train(long, "abort", *apart(backend, 2, 1)))) > 1


@pytest.mark.sglang
@pytest.mark.slow
def test_a_decode_engine_of_sglang_is_scored_by_its_own_weights(tiny, tmp_path):
    """The decode engine gets keys and values from a prefill engine with the same weights, or with other ones."""
    pytest.importorskip(PACKAGES["sglang"], exc_type=ImportError)
    paths = [make_checkpoint(tmp_path / str(seed), seed=seed, vocab_size=64) for seed in (0, 7)]
    words = grpo_arguments(tiny, tmp_path / "run", "--hf-checkpoint", str(paths[0]), *apart("sglang", 2, 1))
    args = parse(words[1:], "train")
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]
        ours = [model(torch.tensor([tokens])).logits[0].log_softmax(-1) for model in models]
    expected = [[float(rows[i, token]) for i, token in enumerate(tokens[1:])] for rows in ours]
    start = partial(start_engine, args, num_threads=1, log_dir=tmp_path)
    specs = plan_engines(args)
    engines = [start(specs[0]), start(specs[1]), start(replace(specs[1].on(paths[1]), index=2))]
    try:
        for engine in engines:
            engine.wait_ready(200)
            engine.prefills = engines[:1]
        prefill, same, other = (engine.prompt_log_probs(tokens, timeout=60) for engine in engines)
        assert max(abs(x - y) for x, y in zip(prefill, expected[0], strict=True)) < 1e-5
        assert max(abs(x - y) for x, y in zip(same, expected[0], strict=True)) < 1e-5
        assert min(abs(x - y) for x, y in zip(other[1:], expected[0][1:], strict=True)) > 0  # all but the first token
        assert sum(abs(x - y) for x, y in zip(other, expected[0], strict=True)) / len(other) > 0.01
    finally:
        for engine in engines:
            engine.stop()

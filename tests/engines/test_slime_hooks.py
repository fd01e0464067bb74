"""What docs/migration.md says of functions that were written for slime, on a running embedded engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.engines.engine import Engine as ControlledEngine
from instep.engines.router import Router
from instep.rollout.outputs import as_train_output
from instep.rollout.tokens import tokenizer_of
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from instep.types import Sample
from tests import keys
from tests.engines import slime_hooks
from tests.engines.conftest import PARAMS
from tests.engines.rollouts import rollout, source_of
from tests.engines.running import Engine

ME = slime_hooks.__name__


def test_turns_with_a_tool_a_keyed_reward_and_a_filter(make_args: Callable[..., Any]) -> None:
    args = make_args(
        *("--custom-generate-function-path", f"{ME}.generate_with_tool", "--custom-rm-path", f"{ME}.reward_func"),
        *("--reward-key", "score", "--dynamic-sampling-filter-path", f"{ME}.keep_groups_that_differ"),
        "--deterministic-mode",  # which groups are first must not depend on the clock
    )
    output = rollout(args)
    assert [group[0].group_index for group in output.samples] == [2, 3, 4, 5]  # the filter dropped 0 and 1
    assert output.metrics["rollout/num_groups_filtered/zero_std_0.0"] == 2
    for sample in (s for group in output.samples for s in group):
        assert sample.get_reward_value(args) == sample.index % 2 == sample.reward["score"]
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert sample.effective_response_length == sum(sample.loss_mask) <= 8
        assert all(p == 0 for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not m)
        assert all(s.version == "7" and all(sample.loss_mask[s.start : s.end]) for s in sample.weight_versions)
        assert sample.status in ("completed", "truncated")
        assert sample.response.endswith(" observed") == (sample.status == "truncated")


def test_groups_that_a_filter_would_drop_are_kept_where_others_are_missing(make_args: Callable[..., Any]) -> None:
    source_args = make_args("--dynamic-sampling-filter-path", f"{ME}.drop_but_do_not_begin_more")
    output = rollout(source_args, source_of(source_args))
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3]  # no further group was begun
    args = make_args(
        *("--dynamic-sampling-filter-path", f"{ME}.drop_but_do_not_begin_more", "--over-sampling-batch-size", "6")
    )
    output = rollout(args)
    assert output.metrics["rollout/num_groups_filtered/dull"] == 2  # of 6 groups, 2 are more than enough


def test_segments_of_one_execution(make_args: Callable[..., Any]) -> None:
    output = rollout(make_args("--custom-generate-function-path", f"{ME}.split_into_segments"))
    for group in output.samples:
        assert len(group) == 4 and group[0].rollout_id == group[1].rollout_id != group[2].rollout_id
        assert group[0].loss_mask == [1] and group[0].reward is not None


def test_a_whole_rollout_over_the_default_one(make_args: Callable[..., Any]) -> None:
    args = make_args()
    output = as_train_output(slime_hooks.generate_rollout(args, 0, source_of(args)))
    assert len(output.samples) == 4 and output.metrics == {"mine": 1.0}


def test_the_data_source_may_be_called(make_args: Callable[..., Any]) -> None:
    args = make_args("--rollout-all-samples-process-path", f"{ME}.process_all_samples")
    assert (args.sglang_router_ip, args.sglang_router_port) == (args.vllm_router_ip, args.vllm_router_port)
    source = source_of(args)
    rollout(args, source)
    assert slime_hooks.seen.pop() == ([0, 1, 2, 3], 4) and source.ledger.dropped["looked at"] == 1


both_kinds = pytest.mark.parametrize("engine", [p for p in PARAMS if "-tied" in p.id], indirect=True)


@pytest.fixture
def view(engine: Engine, make_args: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments of hooks, with the address of an engine."""
    url = keys.knowing(engine.url)
    return lambda *flags: make_args(*flags, "--hf-checkpoint", str(engine.path), url=url, kind=engine.kind)


@both_kinds
def test_the_generate_function_of_slimes_guide(view: Callable[..., Any]) -> None:
    args = view("--custom-generate-function-path", f"{ME}.guides_generate")
    slime_hooks.TOKENIZER = None
    eos = tokenizer_of(args).eos_token
    for sample in (s for group in rollout(args).samples for s in group):
        assert sample.status in (Sample.Status.TRUNCATED, Sample.Status.COMPLETED) and sample.reward is not None
        assert sample.truncated or sample.response.endswith(eos)
        assert sample.response_length >= 1 and sample.rollout_log_probs is None
        assert sample.sampling_params["max_tokens"] == 12 and sample.sampling_params["temperature"] == 1.0


@both_kinds
def test_slimes_own_generate_function_makes_the_same_samples(view: Callable[..., Any]) -> None:
    ours, theirs = rollout(view()), rollout(view("--custom-generate-function-path", f"{ME}.slimes_generate"))
    for mine, sample in zip((s for g in ours.samples for s in g), (s for g in theirs.samples for s in g), strict=True):
        assert sample.tokens == mine.tokens and sample.status == mine.status  # the same seeds
        assert sample.response == mine.response and sample.weight_versions == mine.weight_versions
        assert sample.rollout_log_probs == pytest.approx(mine.rollout_log_probs, abs=1e-4)
        assert sample.sampling_turns == mine.sampling_turns


@pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed")
def test_a_seed_passes_the_router(make_args: Callable[..., Any], server: ControlledEngine, tmp_path: Path) -> None:
    """It knows `/generate`, and drops from its body what SGLang had not when it was written."""
    port = free_port()
    words = Router.command(["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())])
    command, log = [sys.executable, *words], tmp_path / "log.txt"
    url = keys.knowing(f"http://127.0.0.1:{port}")
    router = Router(url, lambda urls: SupervisedProcess("router", command, log, keys.ENVIRONMENT))
    try:
        router.wait_ready(60)
        router.set_members([server.url])
        flags = ("--custom-generate-function-path", f"{ME}.slimes_generate")
        direct, routed = rollout(make_args(*flags)), rollout(make_args(*flags, url=url))
    finally:
        router.stop()
    assert [s.tokens for g in routed.samples for s in g] == [s.tokens for g in direct.samples for s in g]

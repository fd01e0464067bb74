"""Rollouts on a running embedded engine: what they return, filters, partial ones, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from instep.engines.engine import Engine
from instep.errors import EngineError, RolloutError
from instep.rollout import runtime
from instep.rollout.execute import new_execution, run_group, train_sampling_params
from instep.rollout.group_request import generate_group
from instep.rollout.kv_budget import KVBudget
from instep.rollout.vllm_rollout import generate_rollout
from instep.types import Group, Sample, VersionSpan
from tests.engines.rollouts import calls, check_log_probs, eos, rollout, source_of

ME = __name__


def test_what_a_rollout_returns(make_args: Callable[..., Any], tiny_model: Path) -> None:
    args = make_args()
    seen: list[Any] = []
    runtime.state().listener = lambda done, total, extra: seen.append((done, total, extra))
    output = rollout(args)
    runtime.state().listener = None
    assert seen[-1][:2] == (4, 4) and seen[-1][2]["num_filtered"] == 0
    samples = [s for group in output.samples for s in group]
    assert len(samples) == 8 and [s.index for s in samples] == list(range(8))
    assert output.metrics["rollout/num_tokens_generated"] == sum(s.response_length for s in samples)
    version = samples[0].weight_versions[0].version
    for sample in samples:
        assert sample.prompt.endswith("<|im_start|>assistant\n")
        assert 1 <= sample.response_length <= 12
        assert sample.weight_versions == [VersionSpan(version, 0, sample.response_length)]
        assert sample.truncated == (sample.response_length == 12) or sample.tokens[-1] == eos(tiny_model)
        assert sample.reward in (0.0, 1.0)
        assert sample.sampling_params["temperature"] == 1.0 and sample.sampling_params["max_tokens"] == 12
    assert len({s.sampling_params["seed"] for s in samples}) == 8
    assert len({s.execution_id for s in samples}) == 8
    check_log_probs(tiny_model, samples)
    again = rollout(args)
    assert [s.tokens for g in again.samples for s in g] == [s.tokens for s in samples]  # the seeds decide


def keep_odd_groups(args: Any, group: list[Sample]) -> bool:
    return bool(group[0].group_index % 2)


async def see_all(args: Any, groups: list[list[Sample]], source: Any) -> None:
    calls.append(sorted(group[0].group_index for group in groups))


def mark_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def test_over_sampling_with_a_filter(make_args: Callable[..., Any]) -> None:
    args = make_args(
        *("--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{ME}.keep_odd_groups"),
        *("--rollout-all-samples-process-path", f"{ME}.see_all", "--rollout-sample-filter-path", f"{ME}.mark_first"),
    )
    source = source_of(args)
    output = rollout(args, source)
    indices = [group[0].group_index for group in output.samples]
    assert all(i % 2 for i in indices)
    assert set(indices) <= set(calls[0]) and any(i % 2 == 0 for i in calls[0])
    assert output.samples[0][0].remove_sample and not output.samples[1][0].remove_sample
    filtered = source.ledger.dropped["filtered:keep_odd_groups"]
    assert filtered == output.metrics["rollout/num_groups_filtered"] >= 3
    assert source.ledger.num_issued % 6 == 0
    assert source.ledger.num_issued == 4 + sum(source.ledger.dropped.values())


def test_the_built_in_filter(make_args: Callable[..., Any]) -> None:
    path = "instep.rollout.filters.check_reward_nonzero_std"
    output = rollout(make_args("--dynamic-sampling-filter-path", path))
    assert all({s.reward for s in group} == {0.0, 1.0} for group in output.samples)


def keep_nothing(args: Any, group: list[Sample]) -> bool:
    return False


def test_a_filter_that_keeps_nothing_ends(make_args: Callable[..., Any]) -> None:
    args = make_args(
        *("--dynamic-sampling-filter-path", f"{ME}.keep_nothing", "--rollout-batch-size", "1"),
        *("--rollout-max-response-len", "1"),
    )
    with pytest.raises(RolloutError, match="51 groups were discarded and 0 of 1 kept: 51 keep_nothing") as caught:
        generate_rollout(args, 0, source_of(args))
    assert "change the data" in caught.value.remedy


# ---- partial rollouts -----------------------------------------------------------------------------------------------

LONG = ["--rollout-max-response-len", "400"]


def partials(make_args: Callable[..., Any], server: Engine, *extra: str) -> tuple[list[Sample], dict[int, int], Any]:
    """Two rollouts, the weight version set between them; the continued samples and how long they were then."""
    args = make_args(
        "--partial-rollout", "--over-sampling-batch-size", "10", "--rollout-batch-size", "2", *LONG, *extra
    )
    source = source_of(args)
    server.post("/update_weight_version", {"new_version": "1"}, timeout=10)
    rollout(args, source)
    buffer = copy.deepcopy(source.source.buffer)
    assert source.ledger.num_buffered == len(buffer) == 8 and not source.ledger.dropped
    lengths = {s.index: s.response_length for group in buffer for s in group if s.aborted}
    assert lengths and any(lengths.values())
    server.post("/update_weight_version", {"new_version": "2"}, timeout=10)
    done: list[Sample] = []
    while source.source.buffer and len(done) < min(6, len(lengths)):  # a busy machine has fewer
        output = rollout(args, source, 1)
        done += [s for group in output.samples for s in group if s.index in lengths]
    return done, lengths, buffer


def test_partial_rollouts_are_continued(make_args: Callable[..., Any], server: Engine, tiny_model: Path) -> None:
    done, lengths, buffer = partials(make_args, server)
    before = {s.index: s for group in buffer for s in group}
    continued = [s for s in done if 0 < lengths[s.index] < s.response_length]
    assert continued
    for sample in continued:
        k, n = lengths[sample.index], sample.response_length
        old = before[sample.index]
        assert sample.tokens[: len(old.tokens)] == old.tokens and n <= 400
        assert sample.rollout_log_probs[:k] == old.rollout_log_probs and len(sample.rollout_log_probs) == n
        assert sample.weight_versions[0] == VersionSpan("1", 0, k)
        assert sample.weight_versions[1].start == k and sample.weight_versions[-1] == VersionSpan("2", k, n)
        assert sample.loss_mask == [1] * sample.response_length and sample.reward is not None
        assert sample.truncated == (n == 400) or sample.tokens[-1] == eos(tiny_model)
    check_log_probs(tiny_model, continued)


def test_continued_samples_can_be_masked(make_args: Callable[..., Any], server: Engine) -> None:
    done, lengths, _ = partials(make_args, server, "--mask-offpolicy-in-partial-rollout")
    continued = [s for s in done if 0 < lengths[s.index] < s.response_length]
    assert continued
    for sample in continued:
        k = lengths[sample.index]  # a sample may have been aborted once more, later on
        assert len(sample.loss_mask) == sample.response_length and sample.loss_mask[-1] == 1
        assert sample.loss_mask == sorted(sample.loss_mask) and not any(sample.loss_mask[:k])
    assert any(s.loss_mask.index(1) == lengths[s.index] for s in continued)


def test_without_partial_rollouts_the_rest_is_dropped(make_args: Callable[..., Any], server: Engine) -> None:
    args = make_args("--over-sampling-batch-size", "10", "--rollout-batch-size", "2", *LONG)
    source = source_of(args)
    rollout(args, source)
    assert not source.source.buffer and sum(source.ledger.dropped.values()) == 8
    assert set(source.ledger.dropped) <= {"aborted", "surplus"} and source.ledger.dropped["aborted"]


def test_an_abort_by_somebody_else_is_continued(
    make_args: Callable[..., Any], server: Engine, tiny_model: Path
) -> None:
    args = make_args("--rollout-max-response-len", "300", "--rollout-batch-size", "8")
    source = source_of(args)
    stop, aborted = threading.Event(), []

    def disturb() -> None:
        while not stop.wait(0.05) and len(aborted) < 50:  # a sample is continued 100 times
            aborted.append(server.post("/abort_requests", {}, timeout=10)["aborted"])

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        output = rollout(args, source)
    finally:
        stop.set()
        disturber.join()
    assert sum(aborted) > 0 and source.ledger.num_issued == 8  # none was thrown away
    samples = [s for group in output.samples for s in group]
    assert all(s.response_length == 300 or s.tokens[-1] == eos(tiny_model) for s in samples)
    check_log_probs(tiny_model, samples)


@pytest.mark.parametrize("flags", [(), ("--rollout-temperature", "0.7", "--rollout-stop", "a", "+")])
def test_oracle_a_group_at_once_is_what_its_samples_are_one_by_one(
    make_args: Callable[..., Any], server: Engine, flags: tuple[str, ...]
) -> None:
    args = make_args("--rollout-max-response-len", "40", "--n-samples-per-prompt", "5", *flags)
    group, params = source_of(args).get_samples(1)[0], train_sampling_params(args)

    async def both() -> list[list[dict[str, Any]]]:
        alone, together = new_execution(args, 0), new_execution(args, 0)
        rows = [await run_group(alone, copy.deepcopy(group), params)]
        rows.append(await run_group(together, copy.deepcopy(group), params, generate_group))
        assert together.lengths == alone.lengths and together.num_tokens == alone.num_tokens > 0
        assert together.kv_budget.num_inside == alone.kv_budget.num_inside == 0
        seeded, direct = {**params, "seed": rows[0][0].sampling_params["seed"]}, copy.deepcopy(group)
        work = generate_group(args, direct, seeded)
        assert work is not None  # it has not left them to the other way
        await work
        assert [s.tokens for s in direct] == [s.tokens for s in rows[0]]
        return [[sample.to_dict() for sample in row] for row in rows]

    alone, together = runtime.run(both(), timeout=60)
    for one, other in zip(alone, together, strict=True):  # log-probs depend on what runs at once, in their last bits
        assert one.pop("rollout_log_probs") == pytest.approx(other.pop("rollout_log_probs"), abs=1e-5)
    assert alone == together and len({str(row["tokens"]) for row in alone}) > 1


@pytest.mark.parametrize("spread", [1.0, 1.6, 3.0])
@pytest.mark.parametrize("ends", ["fails", "aborted"])
def test_a_group_that_ends_early_leaves_the_room(make_args: Callable[..., Any], ends: str, spread: float) -> None:
    args = make_args("--n-samples-per-prompt", "3")
    group = source_of(args).get_samples(1)[0]

    async def main() -> int:
        execution = new_execution(args, 0)
        execution.spread = spread

        async def fails(*_: Any) -> None:
            raise EngineError("no answer")

        async def aborted(*_: Any) -> None:
            assert execution.kv_budget.num_inside == {1.0: 3, 1.6: 2, 3.0: 1}[spread]
            execution.aborted = True

        with pytest.raises(EngineError) if ends == "fails" else contextlib.nullcontext():
            await run_group(execution, group, train_sampling_params(args), fails if ends == "fails" else aborted)
        return execution.kv_budget.num_inside

    assert runtime.run(main(), timeout=60) == 0


def test_oracle_groups_of_known_spread_go_together_where_others_wait(
    make_args: Callable[..., Any], server: Engine
) -> None:
    """And as many groups at once as sample by sample: 7 have room, of each 3 one is over on average."""
    args = make_args("--n-samples-per-prompt", "3", "--rollout-max-response-len", "8")
    groups, under_way, most = source_of(args).get_samples(5), 0, 0

    def noted(*given: Any) -> Awaitable[None]:
        async def work() -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            found = generate_group(*given)
            assert found is not None
            await found
            under_way -= 1

        return work()

    async def rollout(spread: float, together: Any) -> list[list[Any]]:
        execution, params = new_execution(args, 0), train_sampling_params(args)
        execution.kv_budget, execution.spread = KVBudget(7), spread
        rows = await asyncio.gather(*(run_group(execution, group, params, together) for group in copy.deepcopy(groups)))
        assert (
            execution.kv_budget.num_inside == 0
        )  # log-probs depend on what an engine runs at once, in their last bits
        return [[(s.execution_id, s.tokens, s.response, s.status, s.sampling_params) for s in row] for row in rows]

    async def both() -> tuple[Any, Any]:
        return await rollout(math.inf, None), await rollout(1.6, noted)

    alone, at_once = runtime.run(both(), timeout=60)
    assert alone == at_once and most == 3


def test_groups_for_whose_room_others_wait_are_no_single_requests(
    make_args: Callable[..., Any], server: Engine
) -> None:
    """Where nothing is known of their lengths; also the first ones, which come in before the others have asked."""
    args = make_args("--n-samples-per-prompt", "3", "--rollout-max-response-len", "8")
    groups, asked = source_of(args).get_samples(4), list[int | None]()

    def noted(args: Any, group: Group, params: dict[str, Any], evaluation: bool) -> Awaitable[None] | None:
        asked.append(group[0].group_index)
        return generate_group(args, group, params, evaluation)

    async def main() -> None:
        execution = new_execution(args, 0)
        execution.kv_budget, execution.spread = KVBudget(6), math.inf
        params = train_sampling_params(args)
        await asyncio.gather(*(run_group(execution, group, params, noted) for group in groups))

    runtime.run(main(), timeout=60)
    assert not {groups[0][0].group_index, groups[1][0].group_index}.intersection(asked)

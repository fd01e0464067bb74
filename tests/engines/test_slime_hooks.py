"""What README and docs/migration.md say of functions that were written for slime, on a running embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.rollout.outputs import as_train_output
from tests.engines import slime_hooks
from tests.engines.rollouts import rollout, source_of

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

"""Alarms: when each is raised, when it is not, and that runs that solve their task raise none.

`recorded/` holds the metrics of whole runs: the quickstart with hf and with Megatron, and one that collapses (its
policy is trained on rewards that are noise, at twenty times the learning rate).
"""

import json
import math
from pathlib import Path

import pytest

from instep.observability.alarms import ALARMS, AlarmWatch, Limits, describe


def watch(rows, limits=None):
    """Alarm -> first step, and the texts, of a run with these rows."""
    alarms, texts = AlarmWatch(limits or Limits()), []
    for step, row in enumerate(rows):
        texts += alarms.check(step, row)[1]
    return alarms.first, texts


def series(name, values):
    return [{name: value} for value in values]


HEALTHY = [
    {
        "train/entropy": 0.52 * 0.88**i,
        "train/log_prob_gap_mean": 1e-6,
        "train/engine_kl": 1e-9,
        "train/effective_sample_ratio": 0.9,
        "train/grad_norm": 1.0 + 0.3 * (i % 3),
        "rollout/truncated_ratio": 0.3,
        "rollout/zero_std_groups_ratio": 0.8,
        "rollout/reward_mean": 0.4 + 0.02 * i,
        "rollout/response_length_mean": 20.0 + i % 4,
    }
    for i in range(25)
]


def test_a_healthy_run_raises_none():
    assert watch(HEALTHY) == ({}, [])
    out, _ = AlarmWatch(Limits()).check(0, HEALTHY[0])
    assert out == {f"alarm/{name}": 0.0 for name in ALARMS}


@pytest.mark.parametrize(
    "alarm, rows, step",
    [
        ("entropy_collapse", series("train/entropy", [1.0, 1.2, 0.9, 0.5, 0.021, 0.019]), 5),
        ("gap_drift", series("train/log_prob_gap_mean", [0.001, 0.001, 0.001, 0.009, 0.011, 0.012]), 5),
        ("gap_drift", series("train/log_prob_gap_mean", [0.11]), 0),
        ("gap_drift", series("train/engine_kl", [1e-4, 1e-4, 1e-4, 1e-4, -0.2]), 4),
        ("off_policy", series("train/effective_sample_ratio", [0.9, 0.8, 0.2, 0.1, 0.1]), 4),
        ("truncation", series("rollout/truncated_ratio", [0.0, 0.6, 0.6, 0.6]), 3),
        ("zero_variance_groups", series("rollout/zero_std_groups_ratio", [1.0, 1.0, 1.0]), 2),
        ("grad_norm_spike", series("train/grad_norm", [1, 1, 2, 1, 1, 11]), 5),
        ("grad_norm_spike", series("train/grad_norm", [1.0, math.nan]), 1),
        ("reward_stuck", series("rollout/reward_mean", [0.3] * 20), 19),
        ("nothing_trained", series("train/loss_weight", [1.0, 0.0, 1.0, 0.0, 0.0]), 4),
        ("nothing_trained", series("train/rs_clipfrac", [0.5, 1.0, 1.0]), 2),
        ("nothing_trained", series("train/opsm_clipfrac", [1.0, 1.0]), 1),
        ("nothing_trained", series("train/grad_norm", [1.0, 0.0, 0.0]), 2),
        ("length_explosion", series("rollout/response_length_mean", [10, 10, 11, 10, 10, 31]), 5),
    ],
)
def test_each_alarm_and_the_step_it_is_raised_at(alarm, rows, step):
    first, texts = watch(rows)
    assert first == {alarm: step}
    assert len(texts) == 1 and texts[0].startswith(f"alarm {alarm}: ") and "; " in texts[0]  # a figure and a remedy


@pytest.mark.parametrize(
    "rows",
    [
        series("train/entropy", [1.0, 1.0, 1.0, 0.03]),
        series("train/log_prob_gap_mean", [0.02] * 9),  # a steady gap, as bf16 has it
        series("train/log_prob_gap_mean", [0.05, 0.05, 0.07, 0.05, 0.067, 0.1003, 0.073]),  # of the probe's few tokens
        series("rollout/truncated_ratio", [1.0, 1.0]),  # no window of three yet
        series("rollout/truncated_ratio", [1.0, 0.1, 0.1, 1.0, 0.1]),
        series("rollout/reward_mean", [0.3] * 19),
        series("train/grad_norm", [1, 1, 1, 50]),  # too few to know what is usual
    ],
)
def test_what_raises_none(rows):
    assert watch(rows) == ({}, [])


RECORDED = Path(__file__).parent / "recorded"


def test_a_gradient_of_nothing_to_learn_is_no_fault_of_masks():
    """Groups with one reward throughout have an alarm of their own, and a solved task has none."""
    equal = [{"train/grad_norm": 0.0, "train/loss_weight": 1.0, "rollout/zero_std_groups_ratio": 1.0}] * 2
    assert watch(equal)[0] == {}
    solved = {"rollout/reward_mean": 0.99, "rollout/reward_max": 1.0, "rollout/reward_std": 0.4}
    assert watch([{"train/grad_norm": 0.0, "rollout/zero_std_groups_ratio": 0.9, **solved}] * 5)[0] == {}


@pytest.mark.parametrize(
    "rows,what",
    [
        (series("train/loss_weight", [0.0, 0.0]), "every token was masked"),
        ([{"train/grad_norm": 0.0, "rollout/zero_std_groups_ratio": 1.0}], "every group had equal rewards"),
        (series("train/grad_norm", [0.0] * 2), "train/grad_norm was 0"),
        (series("train/grad_norm", [0.0, 0.0, 0.0, 0.5, *[0.0] * 300]), ""),  # the one that trained is forgotten
        (series("eval/reward_mean", [0.5]), ""),
        ([], ""),
    ],
)
def test_a_run_that_has_trained_nothing_says_so_at_its_end(rows, what):
    fresh, resumed = AlarmWatch(Limits()), AlarmWatch(Limits(), rows)
    for step, row in enumerate(rows):
        fresh.check(step, row)
    for alarms in (fresh, resumed):
        assert alarms.at_end() == ([f"no step has trained anything: {what}"] if what else [])


@pytest.mark.parametrize("ratios,told", [([1.0], True), ([1.0, 1.0], True), ([1.0, 0.9], False), ([1.0] * 3, False)])
def test_a_short_run_in_which_all_is_cut_off_says_so_at_its_end(ratios, told):
    alarms = AlarmWatch(Limits(), [row | {"train/grad_norm": 1.0} for row in series("rollout/truncated_ratio", ratios)])
    texts = alarms.at_end()
    assert [text[:46] for text in texts] == ["alarm truncation: 100% of the responses are cu"] * told
    assert alarms.first == ({"truncation": len(ratios) - 1} if told else {})
    assert AlarmWatch(Limits(truncated_ratio=1), series("rollout/truncated_ratio", ratios)).at_end() == []


def recorded(name):
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["quickstart_hf", "quickstart_megatron"])
def test_the_quickstart_raises_none(name):
    """Also where its entropy falls below the bound; without rewards that would be a collapse."""
    rows = recorded(name)
    assert watch(rows) == ({}, [])
    for fraction in (0.05, 0.1):
        assert watch(rows, Limits(entropy_fraction=fraction, zero_std_ratio=0.6)) == ({}, [])
        unknown = [{name: v for name, v in row.items() if "reward" not in name} for row in rows]
        assert "entropy_collapse" in watch(unknown, Limits(entropy_fraction=fraction))[0]


def test_a_solved_task_stays_quiet():
    """However long it goes on: no entropy, one reward in all groups, a large gradient when one sample is wrong."""
    solved = {"train/entropy": 1e-3, "train/grad_norm": 1e-3, "rollout/reward_mean": 1.0, "rollout/reward_std": 0.0}
    solved |= {"rollout/reward_max": 1.0, "rollout/zero_std_groups_ratio": 1.0}
    later = [solved] * 30 + [{**solved, "train/grad_norm": 0.5, "rollout/reward_mean": 0.996}] + [solved] * 300
    assert watch(recorded("quickstart_hf") + later) == ({}, [])


def test_a_collapse_is_told():
    """The entropy falls by itself: the reward stays where it was, below what single samples get."""
    first, texts = watch(recorded("collapse"), Limits(truncated_ratio=1))
    assert first == {"entropy_collapse": 13}
    assert "train/entropy is 0.00937" in texts[0] and "the reward does not rise (0.477)" in texts[0]


@pytest.mark.parametrize(
    "rewards, best, told",
    [
        ([0.2] * 9, 1.0, True),
        ([0.5, 0.4, 0.3, 0.2, 0.1] + [0.0] * 4, 1.0, True),  # it falls with the entropy
        ([0.0] * 9, 0.0, True),  # never one that was right
        ([0.1 * i for i in range(9)], 1.0, False),  # it rises
        ([0.5] * 4 + [0.97] * 5, 1.0, False),  # solved
        ([0.5] * 4 + [-0.03] * 5, 0.0, False),  # the best reward is 0: the number itself says nothing
        ([0.5] * 9, None, True),
    ],
)
def test_an_entropy_that_falls_is_a_collapse_where_nothing_is_gained(rewards, best, told):
    std = 0.4 if any(rewards) else 0.0
    rows = [{"rollout/reward_mean": r, "rollout/reward_std": std, "train/entropy": 1.0} for r in rewards]
    if best is not None:
        rows = [{**row, "rollout/reward_max": best} for row in rows]
    rows = [{**row, "train/entropy": 0.01 if i > 7 else 1.0} for i, row in enumerate(rows)]
    assert watch(rows)[0] == ({"entropy_collapse": 8} if told else {})


def test_flags_move_the_bounds_and_switch_off():
    collapsed = series("train/entropy", [1.0, 1.0, 1.0, 0.03])
    assert watch(collapsed, Limits(entropy_fraction=0.05))[0] == {"entropy_collapse": 3}
    off = Limits(entropy_fraction=0, gap=0, truncated_ratio=1, zero_std_ratio=1, effective_sample_ratio=0)
    bad = {
        "train/entropy": 0.0,
        "train/log_prob_gap_mean": 9.0,
        "train/effective_sample_ratio": 0.0,
        "rollout/truncated_ratio": 1.0,
        "rollout/zero_std_groups_ratio": 1.0,
    }
    assert watch([bad] * 5, off) == ({}, [])
    assert Limits.from_args({"alarm_gap": 0.5, "lr": 1}) == Limits(gap=0.5)


def test_a_resumed_run_remembers_its_start_and_does_not_tell_twice():
    rows = [{"step": i, "train/entropy": 1.0, "alarm/truncation": float(i == 2)} for i in range(4)]
    alarms = AlarmWatch(Limits(), rows)
    out, texts = alarms.check(4, {"train/entropy": 0.01})
    assert out == {"alarm/entropy_collapse": 1.0} and len(texts) == 1
    assert alarms.check(5, {"train/entropy": 0.01}) == ({"alarm/entropy_collapse": 1.0}, [])
    assert describe(alarms.first) == "truncation (rollout 2), entropy_collapse (rollout 4)"
    assert describe({}) == "none"


def test_a_long_run_keeps_its_start():
    assert watch(series("train/entropy", [1.0] * 500 + [0.01]))[0] == {"entropy_collapse": 500}

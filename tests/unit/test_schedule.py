"""The schedule: every sample once, whole executions, equal counts, budgets kept, errors with numbers that work."""

from __future__ import annotations

import itertools
import random

import pytest

from instep.data.schedule import balanced_partition, even_fit, first_fit, plan_steps, steps_of_samples
from instep.errors import ConfigError
from instep.types import Schedule


def per_step(schedule: Schedule, ids: list, num_steps: int, dp_size: int, multiple: int = 1) -> int:
    """How many executions each step of the schedule has; it is a right one."""
    flat = [i for ranks in schedule for bins in ranks for members in bins for i in members]
    assert sorted(flat) == list(range(len(ids)))
    assert len(schedule) == num_steps
    steps = steps_of_samples(schedule, len(ids))
    seen: dict = {}
    for i, execution in enumerate(ids):
        key = ("only", i) if execution is None else execution
        assert seen.setdefault(key, steps[i]) == steps[i]
    sizes = {sum(1 for s in seen.values() if s == step) for step in range(num_steps)}
    (size,) = sizes
    for ranks in schedule:
        assert len(ranks) == dp_size
        counts = {len(bins) for bins in ranks}
        assert len(counts) == 1 and counts.pop() % multiple == 0
        assert all(members for bins in ranks for members in bins)
    return size


BALANCED = [{}, {"balance_data": True}, {"balance_data": True, "balance_by_flops": True}]


def flops(length: int) -> float:
    return 100.0 * length + length**2


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("balance", BALANCED, ids=["in turn", "ranks", "micro-batches"])
def test_any_dynamic_schedule(seed: int, balance: dict):
    """Samples of one token and of twice the budget; executions of one sample, or some of them of several."""
    rng = random.Random(seed)
    dp_size, multiple, num_steps = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 4]), rng.choice([1, 2])
    num = num_steps * dp_size * multiple * rng.randint(1, 6)
    ids = [f"execution {i}" for i in range(num)] if seed % 2 else [None] * num
    for _ in range(rng.randint(0, 20) if seed % 4 == 1 else 0):
        ids.insert(rng.randrange(num), rng.choice(ids))
    lengths = [rng.choice([1, 2, rng.randint(1, 20), rng.randint(20, 200)]) for _ in ids]
    schedule = plan_steps(
        ids, lengths, costs=[flops(n) for n in lengths], dp_size=dp_size, num_steps=num_steps, max_tokens_per_gpu=100,
        micro_batch_multiple=multiple, **balance,
    )  # fmt: skip
    assert per_step(schedule, ids, num_steps, dp_size, multiple) > 0
    for ranks in schedule:
        micro_batches = [m for bins in ranks for m in bins]
        enough = sum(map(len, micro_batches)) >= len(micro_batches) + dp_size * multiple
        for members in micro_batches if enough or len(set(ids)) == len(ids) or not seed % 2 else ():
            assert sum(lengths[i] for i in members) <= 100 or len(members) == 1


def test_micro_batches_of_equal_flops_need_no_more_room():
    rng = random.Random(0)
    lengths = [min(4000, int(rng.lognormvariate(6, 1)) + 1) for _ in range(256)]
    where = dict(costs=[flops(n) for n in lengths], dp_size=4, num_steps=1, max_tokens_per_gpu=4096)
    spread, counts = [], []
    for balance in BALANCED:
        (ranks,) = plan_steps([None] * 256, lengths, **where, **balance)
        sums = [[sum(flops(lengths[i]) for i in m) for m in bins] for bins in ranks]
        of_ranks, flat = [sum(bins) for bins in sums], [x for bins in sums for x in bins]
        spread.append((max(of_ranks) / min(of_ranks), max(flat) / min(flat)))
        counts.append(len(flat))
    assert spread[0][0] > 1.3 and spread[1][0] < 1.01 and spread[2][0] < 1.04, "of ranks"
    assert spread[2][1] < 0.6 * spread[1][1], "of micro-batches; some are full before they cost as much as others"
    assert counts == [44, 44, 44]


def test_even_fit_by_hand():
    fit = even_fit([0, 1, 2, 3, 4], [60, 50, 40, 30, 200], [6, 5, 4, 3, 20], 100, 1)
    assert fit == [[4], [0], [1], [2, 3]]
    assert even_fit([2, 1, 0], [60, 50, 40], [6, 5, 4], 100, 1) == [[0], [2, 1]]
    assert even_fit([0, 1, 2], [90, 90, 20], [3, 2, 1], 100, 1) == [[0], [1], [2]], "two would do for 200 tokens"


def test_first_fit_by_hand():
    assert first_fit([0, 1, 2, 3, 4], [60, 50, 40, 30, 200], 100) == [[0, 2], [1, 3], [4]]


def test_the_largest_bin_is_split_until_all_ranks_have_work():
    schedule = plan_steps([None] * 4, [10, 20, 30, 40], dp_size=2, num_steps=1, max_tokens_per_gpu=1000)
    assert schedule == [[[[0, 3]], [[1, 2]]]]


def test_static_schedule_by_hand():
    schedule = plan_steps([None] * 8, [1] * 8, dp_size=2, global_batch_size=4, micro_batch_size=1)
    assert schedule == [[[[0], [2]], [[1], [3]]], [[[4], [6]], [[5], [7]]]]
    assert steps_of_samples(schedule, 9) == [0, 0, 0, 0, 1, 1, 1, 1, -1]


def test_executions_stay_whole_and_in_first_seen_order():
    ids = ["a", "b", "a", "c", "d", "c", "b"]
    schedule = plan_steps(ids, [1] * 7, dp_size=1, global_batch_size=2, micro_batch_size=4)
    assert per_step(schedule, ids, 2, 1) == 2
    assert schedule[0][0] == [[0, 2, 1, 6]] and schedule[1][0] == [[3, 5, 4]]


def test_fan_out_of_any_number_of_samples_can_be_scheduled():
    for num_siblings in range(1, 8):
        ids = ["a"] * num_siblings + ["b", "c", "d"]
        schedule = plan_steps(ids, [200] * len(ids), dp_size=2, num_steps=1, max_tokens_per_gpu=100)
        assert per_step(schedule, ids, 1, 2) == 4


def test_balance_makes_ranks_about_equal():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(64)]
    spread = {}
    for balance in (False, True):
        (ranks,) = plan_steps([None] * 64, lengths, dp_size=4, num_steps=1, micro_batch_size=2, balance_data=balance)
        sums = [sum(lengths[i] for members in bins for i in members) for bins in ranks]
        spread[balance] = max(sums) - min(sums)
        assert per_step([ranks], [None] * 64, 1, 4) == 64
    assert spread[True] < 0.1 * spread[False]


def test_balanced_partition_against_all_partitions():
    weights = [9, 7, 6, 5, 4, 2]
    parts = balanced_partition(weights, 2)
    assert sorted(i for part in parts for i in part) == list(range(6)) and {len(p) for p in parts} == {3}
    spread = abs(sum(weights[i] for i in parts[0]) - sum(weights[i] for i in parts[1]))
    best = min(abs(sum(weights) - 2 * sum(c)) for c in itertools.combinations(weights, 3))
    assert spread == best == 1
    assert balanced_partition([], 3) == [[], [], []]


@pytest.mark.parametrize(
    ("num", "kwargs", "numbers"),
    [
        (12, {"global_batch_size": 5, "micro_batch_size": 1}, "use 4 or 6"),
        (12, {"num_steps": 5, "micro_batch_size": 1}, "use 4 or 6"),
        (3, {"global_batch_size": 8, "micro_batch_size": 1}, "use 3"),
        (7, {"num_steps": 1, "micro_batch_size": 1}, "use 6 or 8"),
        (1, {"num_steps": 1, "max_tokens_per_gpu": 10}, "use 2"),
        (0, {"num_steps": 1, "micro_batch_size": 1}, ""),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers_that_do(num: int, kwargs: dict, numbers: str):
    with pytest.raises(ConfigError) as error:
        plan_steps([None] * num, [1] * num, dp_size=2, **kwargs)
    assert numbers in error.value.remedy


def test_the_numbers_of_the_remedy_work():
    for size in (4, 6):
        schedule = plan_steps([None] * 12, [1] * 12, dp_size=2, global_batch_size=size, micro_batch_size=1)
        assert per_step(schedule, [None] * 12, 12 // size, 2) == size

"""The division of a rollout's samples into optimizer steps, data-parallel ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from instep.errors import ConfigError
from instep.types import Schedule


def plan_steps(
    execution_ids: Sequence[Hashable | None],
    total_lengths: Sequence[int],
    *,
    dp_size: int,
    costs: Sequence[float] | None = None,
    num_steps: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_gpu: int | None = None,
    balance_data: bool = False,
    balance_by_flops: bool = False,
    micro_batch_multiple: int = 1,
) -> Schedule:
    """Divide a rollout's samples into steps with equally many executions, and each step over ranks and micro-batches.

    Executions (samples with the same entry in `execution_ids`; a sample with None is an execution) stay whole, in the
    order of their first samples. A micro-batch holds at most `micro_batch_size` samples or `max_tokens_per_gpu` prompt
    + response tokens. A longer sample is alone in one. All ranks of a step get equally many micro-batches, a multiple
    of `micro_batch_multiple`: the largest are split until that holds. Ranks take micro-batches in turn, or with
    `balance_data` so that their costs are about equal (Karmarkar-Karp). With `balance_by_flops` there are as many
    micro-batches as the tokens need. The samples, the most costly first, go into the cheapest one with room.

    Args:
        execution_ids, total_lengths: one entry per sample.
        costs: the cost to train on each sample, such as its FLOPs; its tokens if None.
        num_steps, global_batch_size: exactly one of them: steps per rollout, or executions per step.
        micro_batch_size, max_tokens_per_gpu: exactly one of them.

    Returns:
        steps -> ranks -> micro-batches -> indices of samples; each sample occurs once.

    Raises:
        ConfigError: the executions do not divide into steps, or a step's samples over the ranks.
    """
    costs = total_lengths if costs is None else costs
    executions: dict[Hashable, list[int]] = {}
    for i, execution in enumerate(execution_ids):
        executions.setdefault(("sample", i) if execution is None else ("id", execution), []).append(i)
    size = _executions_per_step(len(executions), num_steps, global_batch_size)
    groups = list(executions.values())
    schedule = []
    for start in range(0, len(groups), size):
        step = groups[start : start + size]
        samples = [i for group in step for i in group]
        unit = dp_size * micro_batch_multiple
        if micro_batch_size is not None:
            bins = [samples[i : i + micro_batch_size] for i in range(0, len(samples), micro_batch_size)]
        elif balance_by_flops:
            bins = even_fit(samples, total_lengths, costs, max_tokens_per_gpu or 0, unit)
        else:
            bins = first_fit(samples, total_lengths, max_tokens_per_gpu or 0)
        bins = _fill_up(bins, total_lengths, unit, fan_out=len(samples) > len(step))
        schedule.append(_deal(bins, costs, dp_size, balance_data))
    return schedule


def plan_whole_executions(
    execution_ids: Sequence[Hashable],
    total_lengths: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    **sizes: Any,
) -> Schedule:
    """Call `plan_steps` for losses over all samples of an execution at once (DPO's pairs).

    The samples of an execution share a micro-batch. `micro_batch_size` counts executions. The tokens and costs of an
    execution are those of all its samples. They are side by side in their micro-batch, in order.
    """
    members: dict[Hashable, list[int]] = {}
    for i, execution in enumerate(execution_ids):
        members.setdefault(execution, []).append(i)
    units = list(members.values())
    lengths = [sum(total_lengths[i] for i in unit) for unit in units]
    totals = None if costs is None else [sum(costs[i] for i in unit) for unit in units]
    schedule = plan_steps([None] * len(units), lengths, costs=totals, **sizes)
    return [[[[i for u in m for i in units[u]] for m in rank] for rank in step] for step in schedule]


def steps_of_samples(schedule: Schedule, num_samples: int) -> list[int]:
    """Return the step of each sample; -1 for a sample that the schedule leaves out."""
    out = [-1] * num_samples
    for step, ranks in enumerate(schedule):
        for micro_batches in ranks:
            for indices in micro_batches:
                for i in indices:
                    out[i] = step
    return out


def first_fit(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sample into the first bin with room for its tokens, in order. One beyond `capacity` is alone."""
    bins: list[list[int]] = []
    room: dict[int, int] = {}  # of the bins with room for at least the shortest sample, in order
    shortest = min((lengths[i] for i in samples), default=0)
    for i in samples:
        b = next((b for b, left in room.items() if lengths[i] <= left), len(bins))
        if b == len(bins):
            bins.append([])
            room[b] = capacity
        bins[b].append(i)
        room[b] -= lengths[i]
        if room[b] < shortest:
            del room[b]
    return bins


def even_fit(
    samples: Sequence[int], lengths: Sequence[int], costs: Sequence[float], capacity: int, multiple: int
) -> list[list[int]]:
    """Put each sample, the most costly first, into the cheapest bin with room for its tokens, or into a new one.

    There are as many bins as the tokens need, rounded up to a multiple of `multiple` if there are enough samples. A
    sample beyond `capacity` is alone. Within a bin samples keep their order.
    """
    needed = -(-sum(lengths[i] for i in samples) // max(1, capacity))
    bins: list[list[int]] = [[] for _ in range(min(-(-needed // multiple) * multiple, len(samples)))]
    cheapest = [(0.0, capacity, b) for b in range(len(bins))]  # costs, room
    for i in sorted(samples, key=lambda i: -costs[i]):
        narrow = []
        while cheapest and bins[cheapest[0][2]] and cheapest[0][1] < lengths[i]:
            narrow.append(heapq.heappop(cheapest))
        if not cheapest:
            cheapest.append((0.0, capacity, len(bins)))
            bins.append([])
        total, room, b = heapq.heappop(cheapest)
        bins[b].append(i)
        for entry in (*narrow, (total + costs[i], room - lengths[i], b)):
            heapq.heappush(cheapest, entry)
    place = {i: n for n, i in enumerate(samples)}
    return [sorted(members, key=place.__getitem__) for members in bins]


def balanced_partition(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide indices into `num_parts` parts of equal size, with sums as equal as the differencing method makes them.

    The number of weights must be a multiple of `num_parts`.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced k-way form: begin with
    tuples of items of about equal weight, one per part; merge the two tuples of largest spread, heavy onto light.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    heap = []
    for serial, start in enumerate(range(0, len(order), num_parts)):
        parts = [(weights[i], [i]) for i in order[start : start + num_parts]]
        heap.append((parts[0][0] - parts[-1][0], serial, parts))  # parts ascend, so this is minus the spread
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: part[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], serial, merged))
        serial += 1
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def _executions_per_step(count: int, num_steps: int | None, global_batch_size: int | None) -> int:
    if not count:
        what = "there are no samples to train on"
        raise ConfigError(what, where="schedule", remedy="return at least one group with a sample to train on")
    size, left = divmod(count, num_steps) if num_steps else (global_batch_size or 0, count % (global_batch_size or 1))
    if left or not size:
        flag = "--num-steps-per-rollout" if num_steps else "--global-batch-size"
        given = num_steps or global_batch_size
        below = max((d for d in range(1, (given or 1) + 1) if count % d == 0), default=1)
        above = min((d for d in range(given or 1, count + 1) if count % d == 0), default=count)
        raise ConfigError(
            f"{count} executions of a rollout do not divide by {flag} {given}",
            where=flag,
            remedy=f"use {below}{f' or {above}' if above != below else ''}, or change --rollout-batch-size or "
            "--n-samples-per-prompt",
        )
    return size


def _fill_up(bins: list[list[int]], lengths: Sequence[int], unit: int, *, fan_out: bool) -> list[list[int]]:
    """Split the largest bins until their number is a multiple of `unit`."""
    num_samples = sum(map(len, bins))
    target = -(-len(bins) // unit) * unit
    if target > num_samples and fan_out and num_samples >= unit:
        # With fan-out any number of samples occurs. If bins of one sample are not enough, the smallest samples share a
        # bin.
        return _join_smallest(bins, lengths, num_samples // unit * unit)
    if target > num_samples:
        below = num_samples // unit * unit
        raise ConfigError(
            f"{num_samples} samples of a step cannot make {target} micro-batches (a multiple of {unit}: data-parallel "
            "ranks times the micro-batches of a pipeline)",
            where="--global-batch-size",
            remedy=f"use {f'{below} or ' if below else ''}{below + unit} samples per step, larger micro-batches, or "
            "fewer data-parallel ranks",
        )

    def tokens(members: list[int]) -> int:
        return sum(lengths[i] for i in members)

    while len(bins) < target:
        largest = max((b for b in range(len(bins)) if len(bins[b]) > 1), key=lambda b: (tokens(bins[b]), -b))
        bins[largest : largest + 1] = _halves(bins[largest], lengths)
    return bins


def _halves(members: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return two parts of about equal tokens, the longest samples first. Both keep the order of `members`."""
    halves: list[list[int]] = [[], []]
    sums = [0, 0]
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        lighter = sums.index(min(sums)) if all(halves) else halves.index([])
        halves[lighter].append(i)
        sums[lighter] += lengths[i]
    return [sorted(half, key=members.index) for half in halves]


def _join_smallest(bins: list[list[int]], lengths: Sequence[int], target: int) -> list[list[int]]:
    bins = sorted(bins, key=lambda members: sum(lengths[i] for i in members))
    while len(bins) > target:
        smallest = bins.pop(0)
        bins[0] = smallest + bins[0]
        bins.sort(key=lambda members: sum(lengths[i] for i in members))
    return bins


def _deal(bins: list[list[int]], costs: Sequence[float], dp_size: int, balance: bool) -> list[list[list[int]]]:
    if not balance:
        return [bins[rank::dp_size] for rank in range(dp_size)]
    parts = balanced_partition([sum(costs[i] for i in members) for members in bins], dp_size)
    return [[bins[b] for b in part] for part in parts]

"""What a trainer registers with the Atropos API, and how the API divides its queue into batches.

Atropos' own server makes the same batches from the same groups. Groups are never split. Groups of one size are packed
until they fill the size of the largest waiting group, and only whole packs are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Registration:
    """A trainer's registration, which the API reports to environments; `batch_size` is in sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


@dataclass(frozen=True, eq=False, slots=True)
class Queued:
    """A waiting group: its number of sequences, its environment (None: unknown), and its JSON."""

    size: int
    env_id: int | None
    data: bytes


def indices_with_sum(sizes: Sequence[int], target: int) -> list[int]:
    """Return ascending indices whose sizes sum to `target`: the first that fit in order, otherwise any; or []."""
    taken, total = [], 0
    for i, size in enumerate(sizes):
        if total + size <= target:
            taken.append(i)
            total += size
            if total == target:
                return taken
    reach = [1]  # bit s of reach[i]: some of the first i sizes have the sum s
    for size in sizes:
        reach.append((reach[-1] | reach[-1] << size) & ((2 << target) - 1))
    if not reach[-1] >> target & 1:
        return []
    taken, left = [], target
    for i in range(len(sizes), 0, -1):
        if left >= sizes[i - 1] and reach[i - 1] >> (left - sizes[i - 1]) & 1:
            taken.append(i - 1)
            left -= sizes[i - 1]
    return taken[::-1]


def cut(queue: Sequence[Queued], batch_size: int, shares: dict[int, float]) -> list[int] | None:
    """Return the indices of the groups of the next batch, in its order; None if the queue does not fill a batch.

    Args:
        batch_size: in sequences.
        shares: the minimum parts of a batch of environments with a minimum allocation.
    """
    if not queue:
        return None
    return _by_shares(queue, batch_size, shares) if shares else _in_order(queue, batch_size)


def _packed(sizes: Iterable[tuple[int, int]], largest: int) -> list[int]:
    """Return the indices, from (index, size) pairs, that fill packs of `largest`, in the order of complete packs."""
    open_packs: dict[int, list[int]] = {}
    out = []
    for i, size in sizes:
        pack = open_packs.setdefault(size, [])
        pack.append(i)
        if len(pack) * size == largest:
            out += pack
            open_packs[size] = []
    return out


def _in_order(queue: Sequence[Queued], batch_size: int) -> list[int] | None:
    packed = _packed(((i, group.size) for i, group in enumerate(queue)), max(group.size for group in queue))
    total = 0
    for n, i in enumerate(packed):
        total += queue[i].size
        if total >= batch_size:
            return packed[: n + 1] if total == batch_size else None
    return None


def _by_shares(queue: Sequence[Queued], batch_size: int, shares: dict[int, float]) -> list[int] | None:
    """Return first the guaranteed groups of each environment, then the rest in the order of the queue."""
    largest = max(group.size for group in queue)
    packed = {
        env: _packed(((i, g.size) for i, g in enumerate(queue) if g.env_id == env), largest)
        for env in dict.fromkeys(g.env_id for g in queue if g.env_id is not None)
    }
    wanted = {env: int(batch_size * share) for env, share in shares.items() if int(batch_size * share) > 0}
    if any(not packed.get(env) for env in wanted):
        return None
    if (total := sum(wanted.values())) > batch_size:
        scale = batch_size / total
        wanted = {env: max(min(queue[i].size for i in packed[env]), int(n * scale)) for env, n in wanted.items()}
    out: list[int] = []
    room = batch_size
    for env, least in wanted.items():
        has = 0
        for i in packed[env]:
            if has >= least:
                break
            if queue[i].size <= room:
                out.append(i)
                has, room = has + queue[i].size, room - queue[i].size
    taken = set(out)
    for i in sorted(i for indices in packed.values() for i in indices if i not in taken):
        if 0 < queue[i].size <= room:
            out.append(i)
            room -= queue[i].size
    return None if room else out

"""Every advantage estimator against a slow transcription of its paper in plain Python, from rewards to tokens.

The rollouts are ragged: groups of uneven sizes in no order, fan-out siblings with rewards of their own, tool tokens,
samples without any trained token. What stands at masked tokens is NaN.
"""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from instep.algorithms.advantages.groups import dr_grpo, grpo, max_rl, rloo
from instep.algorithms.advantages.tokens import (
    discounted_sums,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from instep.algorithms.catalog import ALGORITHMS
from instep.controller.advantage_columns import add_advantages
from instep.types import TokenBatch

CLOSE = {"rel": 1e-6, "abs": 1e-9}
STORED = {"rel": 1e-6, "abs": 1e-6}  # the column is float32
SEEDS = range(4)
CRITIC_FREE = sorted(name for name, algorithm in ALGORITHMS.items() if not algorithm.has_critic)


def rollout(seed: int) -> SimpleNamespace:
    """5 groups of 2 to 5 executions, of which some have 2 or 3 samples; lists by sample."""
    rng = random.Random(seed)
    rows = []
    for group in (11, 3, 7, 20, 5):
        for execution in range(rng.randint(2, 5)):
            siblings = rng.choice((1, 1, 2, 3))
            name = None if siblings == 1 and rng.random() < 0.5 else f"{group}.{execution}"
            for _ in range(siblings):
                length = rng.randint(1, 9)
                mask = [int(rng.random() < 0.7) for _ in range(length)]
                reward = rng.choice((0.0, 0.0, 1.0, 0.25, rng.random()))
                rows.append((group, name, 0.0 if group == 7 else reward, mask))  # one group that nobody solves
    rows[2] = (*rows[2][:3], [0] * len(rows[2][3]))
    rng.shuffle(rows)
    groups, names, rewards, masks = map(list, zip(*rows, strict=True))
    old = [[rng.gauss(-1, 0.5) if m else math.nan for m in mask] for mask in masks]
    ref = [[rng.gauss(-1, 0.5) if m else math.nan for m in mask] for mask in masks]
    return SimpleNamespace(groups=groups, names=names, rewards=rewards, masks=masks, old=old, ref=ref)


def tensor(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def flat(rows):
    return [x for row in rows for x in row]


# ---- the papers ------------------------------------------------------------------------------------------------------


def executions_of(r, rewards, i):
    """The mean rewards of the executions of sample i's group, that of its own, and of the others."""
    found = {}
    for j, (group, name) in enumerate(zip(r.groups, r.names, strict=True)):
        if group == r.groups[i]:
            found.setdefault(name or j, []).append(rewards[j])
    means = {key: statistics.fmean(values) for key, values in found.items()}
    own = r.names[i] or i
    return list(means.values()), [mean for key, mean in means.items() if key != own]


def slow_compare(name, r, rewards):
    """Per sample; the formula of `name` on the executions of each group."""
    out = []
    for i, reward in enumerate(rewards):
        means, others = executions_of(r, rewards, i)
        mean = statistics.fmean(means)
        if name in ("grpo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl"):
            out.append((reward - mean) / (statistics.stdev(means) + 1e-6))
        elif name in ("dr_grpo", "reinforce_plus_plus_baseline"):
            out.append(reward - mean)
        elif name == "rloo":
            out.append(reward - statistics.fmean(others))
        elif name == "max_rl":
            out.append((reward - mean) / mean if mean else 0.0)
        else:
            out.append(reward)
    return out


def slow_reinforce_plus_plus(reward, mask, kl, kl_coef, gamma):
    """The return of each action: rewards to come, those of the actions after it discounted once more per action."""
    actions = [t for t, m in enumerate(mask) if m]
    token_reward = {t: -kl_coef * kl[t] for t in actions}
    if actions:
        token_reward[actions[-1]] += reward
    return [
        sum(gamma ** (b - a) * token_reward[s] for b, s in enumerate(actions) if b >= a) if t in actions else 0.0
        for t in range(len(mask))
        for a in [actions.index(t) if t in actions else 0]
    ]


def slow_whiten(rows, masks):
    kept = [x for row, mask in zip(rows, masks, strict=True) for x, m in zip(row, mask, strict=True) if m]
    mean, variance = statistics.fmean(kept), statistics.variance(kept)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def slow_advantages(name, r, *, kl_coef=0.0, gamma=1.0, normalize=False):
    """The whole way, `[sample][token]`; the KL is k1."""
    kl = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(r.old, r.ref, strict=True)]
    rewards = list(r.rewards)
    by_token = name.startswith("reinforce")
    if kl_coef and not by_token:
        for i, (mask, row) in enumerate(zip(r.masks, kl, strict=True)):
            rewards[i] -= kl_coef * sum(k for k, m in zip(row, mask, strict=True) if m)
    compared = slow_compare(name, r, rewards)
    if name == "reinforce_plus_plus":
        parts = zip(compared, r.masks, kl, strict=True)
        out = [slow_reinforce_plus_plus(c, mask, row, kl_coef, gamma) for c, mask, row in parts]
    elif name == "reinforce_plus_plus_baseline" and kl_coef:
        out = [[c - kl_coef * k for k in row] for c, row in zip(compared, kl, strict=True)]
    else:
        out = [[c] * len(mask) for c, mask in zip(compared, r.masks, strict=True)]
    return slow_whiten(out, r.masks) if normalize or by_token else out


# ---- each function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo, max_rl], ids=lambda f: f.__name__)
def test_compared_within_groups(function, seed):
    r = rollout(seed)
    got = function(tensor(r.rewards, grad=True), r.groups, r.names)
    assert got.tolist() == pytest.approx(slow_compare(function.__name__, r, r.rewards), **CLOSE)
    assert not got.requires_grad and got.dtype == torch.float64
    assert function(torch.tensor(r.rewards), torch.tensor(r.groups), r.names).dtype == torch.float32


def test_max_rl_is_the_mean_over_successes_less_the_mean_over_all():
    """Weights of the scores: 1/K for a success, less the control variate 1/N (arXiv:2602.02710)."""
    rewards, n, k = [1.0, 0.0, 0.0, 1.0, 0.0], 5, 2
    got = max_rl(tensor(rewards), [0] * n)
    assert [a / n for a in got.tolist()] == pytest.approx([r / k - 1 / n for r in rewards], **CLOSE)
    assert max_rl(tensor([0.0, 0.0, 0.0]), [0] * 3).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match=r"reward -0.5 \(group 4\) is below 0"):
        max_rl(tensor([1.0, -0.5]), [4, 4])


def test_rloo_is_dr_grpo_scaled_where_nothing_fans_out():
    rewards = [0.5, 1.0, 0.0, 0.25]
    centred = dr_grpo(tensor(rewards), [0] * 4)
    assert rloo(tensor(rewards), [0] * 4).tolist() == pytest.approx((centred * 4 / 3).tolist(), **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kl_coef", "gamma"), [(0.0, 1.0), (0.3, 1.0), (0.3, 0.9), (0.2, 0.0)])
def test_reinforce_plus_plus(seed, kl_coef, gamma):
    r = rollout(seed)
    kl = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(r.old, r.ref, strict=True)]
    expected = [slow_reinforce_plus_plus(*row, kl_coef, gamma) for row in zip(r.rewards, r.masks, kl, strict=True)]
    lengths = [len(mask) for mask in r.masks]
    got = reinforce_plus_plus(
        tensor(r.rewards, grad=True),
        tensor(flat(r.masks)),
        lengths,
        kl=tensor(flat(kl), grad=True) if kl_coef else None,
        kl_coef=kl_coef,
        gamma=gamma,
    )
    assert got.tolist() == pytest.approx(flat(expected), **CLOSE)
    assert not got.requires_grad


def test_reinforce_plus_plus_without_discount_is_reward_less_the_kl_to_come():
    """A_t = r - beta sum_{i >= t} KL(i), the form that arXiv:2501.03262 gives."""
    kl = [0.1, 0.2, 0.4]
    got = reinforce_plus_plus(tensor([2.0]), torch.ones(3), [3], kl=tensor(kl), kl_coef=0.5)
    assert got.tolist() == pytest.approx([2 - 0.5 * 0.7, 2 - 0.5 * 0.6, 2 - 0.5 * 0.4], **CLOSE)
    with pytest.raises(ValueError, match="needs the KL"):
        reinforce_plus_plus(tensor([2.0]), torch.ones(3), [3], kl_coef=0.5)
    with pytest.raises(ValueError, match="needs the KL"):
        reinforce_plus_plus_baseline(tensor([2.0]), [3], kl_coef=0.5)


@pytest.mark.parametrize("factor", [1.0, 0.97, 0.5, 0.0])
def test_discounted_sums(factor):
    rng = random.Random(5)
    lengths = [0, 1, 300, 0, 2, 65, 64, 0]
    rows = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    expected = []
    for row in rows:
        running, out = 0.0, []
        for value in reversed(row):
            running = value + factor * running
            out.append(running)
        expected += reversed(out)
    assert discounted_sums(tensor(flat(rows)), lengths, factor).tolist() == pytest.approx(expected, **CLOSE)
    assert discounted_sums(tensor([]), [], factor).numel() == 0


def test_overlong_penalty():
    """DAPO's eq. 13, case by case: limit 100, buffer 20."""

    def slow(length: int) -> float:
        if length <= 100 - 20:
            return 0.0
        if length <= 100:
            return ((100 - 20) - length) / 20
        return -1.0

    lengths = [1, 79, 80, 81, 90, 99, 100, 101, 500]
    got = overlong_penalty(lengths, max_response_len=100, buffer_len=20, factor=0.5)
    assert got.tolist() == pytest.approx([0.5 * slow(n) for n in lengths], **CLOSE)
    assert overlong_penalty(torch.tensor(lengths), max_response_len=100, buffer_len=20, factor=0.5).equal(got)


# ---- from a batch to its column --------------------------------------------------------------------------------------


def arguments(name, **more):
    settings = {
        "command": "train",
        "advantage_estimator": name,
        "kl_coef": 0.0,
        "kl_loss_type": "k1",
        "use_opd": False,
        "gamma": 1.0,
        "lambd": 1.0,
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "normalize_advantages": False,
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "custom_advantage_function_path": None,
        "overlong_buffer_len": None,
        "overlong_penalty_factor": 1.0,
        "rollout_max_response_len": None,
    }
    return SimpleNamespace(**{**settings, **more})


def batch_of(r):
    lengths = torch.tensor([len(mask) for mask in r.masks])
    columns = {"loss_mask": flat(r.masks), "log_probs": flat(r.old), "ref_log_probs": flat(r.ref)}
    return TokenBatch(
        torch.arange(int(lengths.sum()) + 2 * len(lengths)),
        lengths + 2,
        lengths,
        {name: tensor(values) for name, values in columns.items()},
        {
            "rewards": tensor(r.rewards),
            "group_index": torch.tensor(r.groups),
            "index": torch.arange(len(lengths)),
            "execution_id": r.names,
        },
    )


def trained(values, masks):
    return [x for x, m in zip(values, flat(masks), strict=True) if m]


CASES = [(name, settings) for name in CRITIC_FREE for settings in ({}, {"normalize_advantages": True})]
CASES += [(name, {"kl_coef": 0.2}) for name in CRITIC_FREE if name != "max_rl"]  # whose rewards must not be negative
CASES += [("reinforce_plus_plus", {"kl_coef": 0.1, "gamma": 0.8})]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_the_column(name, settings, seed):
    r = rollout(seed)
    batch = batch_of(r)
    add_advantages(batch, [], arguments(name, **settings), None)
    slow = {key: value for key, value in settings.items() if key != "normalize_advantages"}
    expected = slow_advantages(name, r, normalize="normalize_advantages" in settings, **slow)
    got = trained(batch.token_columns["advantages"].tolist(), r.masks)
    assert got == pytest.approx(trained(flat(expected), r.masks), **STORED)
    assert "returns" not in batch.token_columns


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_the_order_of_samples_changes_nothing(name):
    """Bit for bit in what is compared within groups; whitening sums in another order."""
    r = rollout(9)
    kl_coef = 0.0 if name == "max_rl" else 0.1
    batch = batch_of(r)
    order = random.Random(2).sample(range(len(r.masks)), len(r.masks))
    moved = batch.select(order)
    for b in (batch, moved):
        add_advantages(b, [], arguments(name, kl_coef=kl_coef), None)
    there = batch.select(order).token_columns["advantages"]
    keep = moved.token_columns["loss_mask"] > 0
    assert moved.token_columns["advantages"][keep].tolist() == pytest.approx(there[keep].tolist(), **STORED)


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_siblings_count_once(name):
    """An execution split in two samples with the same reward leaves everybody's advantage (before whitening) alone."""
    whole = SimpleNamespace(
        groups=[0, 0, 0], names=["a", "b", "c"], rewards=[1.0, 0.0, 0.5], masks=[[1, 1], [1, 1], [1, 1]]
    )
    split = SimpleNamespace(
        groups=[0] * 4, names=["a", "a", "b", "c"], rewards=[1.0, 1.0, 0.0, 0.5], masks=[[1], [1], [1, 1], [1, 1]]
    )
    columns = []
    for r in (whole, split):
        r.old = r.ref = [[0.0] * len(mask) for mask in r.masks]
        batch = batch_of(r)
        add_advantages(batch, [], arguments(name), None)
        columns.append(batch.token_columns["advantages"].tolist())
    assert columns[0] == pytest.approx(columns[1], **STORED)

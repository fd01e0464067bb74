"""GAE and the clipped value loss against slow transcriptions of their papers in plain Python, value and gradient."""

from __future__ import annotations

import math
import random

import pytest
import torch

from instep.algorithms.advantages.tokens import gae
from instep.algorithms.losses.value import explained_variance, value_loss
from instep.algorithms.reductions import loss_weights
from instep.training.backend import TokenOutputs
from instep.training.losses import value_loss_fn
from instep.types import TokenBatch

CLOSE = {"rel": 1e-6, "abs": 1e-9}


def tensor(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def ragged(seed, num_samples=7):
    """Responses of 1 to 9 tokens, a third of them a tool's; one has no trained token at all, one a single token."""
    rng = random.Random(seed)
    lengths = [1, *(rng.randint(1, 9) for _ in range(num_samples - 1))]
    masks = [[int(rng.random() < 0.67) for _ in range(n)] for n in lengths]
    masks[0], masks[1] = [1], [0] * lengths[1]
    return rng, lengths, masks


def split(flat, lengths):
    out, start = [], 0
    for n in lengths:
        out.append(flat[start : start + n])
        start += n
    return out


def slow_gae(reward, values, mask, kl, gamma, lambd, kl_coef):
    """Schulman et al. 2016, eq. 16 as its sum: A_t = sum_l (gamma lambda)^l delta_{t+l}, over the actions only."""
    actions = [t for t, m in enumerate(mask) if m]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(actions):
        total = 0.0
        for j in range(i, len(actions)):
            at = actions[j]
            token_reward = -kl_coef * kl[at] + (reward if j == len(actions) - 1 else 0.0)
            following = values[actions[j + 1]] if j + 1 < len(actions) else 0.0
            total += (gamma * lambd) ** (j - i) * (token_reward + gamma * following - values[at])
        advantages[t], returns[t] = total, total + values[t]
    return advantages, returns


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_over_the_trained_tokens(seed, gamma, lambd):
    rng, lengths, masks = ragged(seed)
    n = sum(lengths)
    values, kl = [rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n)]
    rewards, flat_mask = [rng.gauss(0, 2) for _ in lengths], [m for mask in masks for m in mask]
    for t in (i for i, m in enumerate(flat_mask) if not m):  # what stands at a tool's tokens must not matter
        values[t] = kl[t] = math.nan
    expected = [
        slow_gae(r, v, m, k, gamma, lambd, 0.3)
        for r, v, m, k in zip(rewards, split(values, lengths), masks, split(kl, lengths), strict=True)
    ]
    got = gae(
        tensor(rewards), tensor(values, grad=True), tensor(flat_mask), lengths, gamma=gamma, lambd=lambd,
        kl=tensor(kl), kl_coef=0.3,
    )  # fmt: skip
    for i, column in enumerate(got):
        assert column.tolist() == pytest.approx([x for parts in expected for x in parts[i]], **CLOSE)
        assert not column.requires_grad


def test_gae_by_hand():
    """Two actions around a tool's token: the reward lands on the second action, which follows the first at once."""
    advantages, returns = gae(
        tensor([1.0]), tensor([0.5, 9.0, 0.25, 9.0]), tensor([1, 0, 1, 0]), [4], gamma=0.5, lambd=0.5
    )
    assert advantages.tolist() == [0.5 * 0.25 - 0.5 + 0.25 * 0.75, 0.0, 0.75, 0.0]
    assert returns.tolist() == [advantages[0] + 0.5, 0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="kl_coef"):
        gae(tensor([1.0]), tensor([0.5]), tensor([1]), [1], kl_coef=0.1)


def test_lambda_one_gives_the_returns_whatever_the_critic_says():
    _, lengths, masks = ragged(5)
    mask = tensor([m for row in masks for m in row])
    rewards, kl = torch.randn(len(lengths)).double(), torch.randn(sum(lengths)).double()
    returns = [gae(rewards, torch.randn(sum(lengths)).double(), mask, lengths, kl=kl, kl_coef=0.1)[1] for _ in range(2)]
    torch.testing.assert_close(*returns)


def test_gae_of_samples_in_another_order_and_none():
    rng, lengths, masks = ragged(6)
    values = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    rewards = [rng.gauss(0, 1) for _ in lengths]

    def run(order):
        flat_values, flat_mask = ([x for i in order for x in rows[i]] for rows in (values, masks))
        chosen = [lengths[i] for i in order]
        out = gae(tensor([rewards[i] for i in order]), tensor(flat_values), tensor(flat_mask), chosen, lambd=0.9)
        return dict(zip(order, split(out[0].tolist(), chosen), strict=True))

    assert run([3, 6, 0, 2, 5, 1, 4]) == run(range(7))
    advantages, returns = gae(tensor([1.0, 2.0]), tensor([1.0] * 3), tensor([0, 0, 0]), [1, 2])
    assert advantages.tolist() == returns.tolist() == [0.0] * 3


def slow_value_loss(value, old, target, clip):
    """Engstrom et al. 2020, section 3: the greater of both squared errors; and d/d value."""
    bounded = min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (bounded - target) ** 2
    if plain > clipped or value == bounded:
        return plain, 2 * (value - target)
    return clipped, 0.0


@pytest.mark.parametrize("per_token", [False, True])
def test_value_loss_and_its_gradient_in_both_reductions(per_token):
    rng, lengths, masks = ragged(8)
    n, clip = sum(lengths), 0.2
    old, moved = [rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 0.3) for _ in range(n)]
    values, targets = [o + m for o, m in zip(old, moved, strict=True)], [rng.gauss(0, 1) for _ in range(n)]
    steps, ids = [0, 0, 0, 0, 1, 1, 1], ["a", None, "a", None, "b", "b", None]
    mask = [m for row in masks for m in row]
    weights = loss_weights(tensor(mask), lengths, steps, ids, per_token=per_token)

    tokens_of: dict = {}
    keys = [i or k for k, i in enumerate(ids)]
    for key, row in zip(keys, masks, strict=True):
        tokens_of[key] = tokens_of.get(key, 0) + sum(row)
    expected, slopes = 0.0, []
    for step in (0, 1):
        members = [k for k in range(7) if steps[k] == step]
        all_tokens = sum(sum(masks[k]) for k in members)
        for k in members:
            each = all_tokens if per_token else len({keys[m] for m in members}) * max(tokens_of[keys[k]], 1)
            for t in range(lengths[k]):
                at = sum(lengths[:k]) + t
                loss, slope = slow_value_loss(values[at], old[at], targets[at], clip)
                expected += masks[k][t] * loss / each
                slopes.append(masks[k][t] * slope / each)

    given = tensor(values, grad=True)
    batch = TokenBatch(
        torch.zeros(n + 7, dtype=torch.int64), torch.tensor([x + 1 for x in lengths]), torch.tensor(lengths),
        {"loss_weights": weights, "values": tensor(old), "returns": tensor(targets)},
    )  # fmt: skip
    out = value_loss_fn(clip)(batch, TokenOutputs(torch.empty(0), values=given))
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(expected, **CLOSE)
    assert given.grad.tolist() == pytest.approx(slopes, **CLOSE)
    assert 0 < slopes.count(0.0) < n
    share = sum(float(w) for w, m in zip(weights, moved, strict=True) if abs(m) > clip)
    assert float(out.sums["value_clipfrac"]) == pytest.approx(share, **CLOSE)


def test_the_clip_never_makes_the_loss_smaller():
    values, old, target = torch.randn(3, 200).double()
    loss = value_loss(values, old, target, value_clip=0.1).loss
    assert bool((loss >= (values - target).square()).all())
    wide = value_loss(values, old, target, value_clip=100.0)
    torch.testing.assert_close(wide.loss, (values - target).square())
    assert not wide.clipped.any()


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(1 - 4.0)
    assert (
        explained_variance(returns, torch.full((4,), 0.1)) is None
        and explained_variance(torch.empty(0), torch.empty(0)) is None
    )

"""GAE and the value loss against verl's own functions, where verl 0.9.1 is installed beside instep."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from instep.algorithms.advantages.tokens import gae, whiten
from instep.algorithms.losses.value import value_loss
from instep.algorithms.reductions import loss_weights

pytestmark = pytest.mark.peers
CLOSE = {"rel": 1e-6, "abs": 1e-9}


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")


def masks_of(seed):
    """Tool tokens in the middle and at the end; each response has a trained token."""
    rng = random.Random(seed)
    rows = [[int(rng.random() < 0.7) for _ in range(rng.randint(0, 8))] + [1] for _ in range(6)]
    for row in rows[::3]:
        row.extend([0, 0])
    return rows, torch.tensor([float(m) for row in rows for m in row], dtype=torch.float64)


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_oracle_verl_gae(verl, seed, gamma, lambd):
    torch.manual_seed(seed)
    rows, mask = masks_of(seed)
    lengths = [len(row) for row in rows]
    values, kl, rewards = torch.randn(len(mask)).double(), torch.randn(len(mask)).double(), torch.randn(6).double()

    def pad(flat):
        return pad_sequence(list(flat.split(lengths)), batch_first=True)

    keep = pad(mask) > 0
    token_rewards = -0.2 * pad(kl) * pad(mask)
    for i, row in enumerate(rows):
        token_rewards[i, max(t for t, m in enumerate(row) if m)] += rewards[i]
    theirs = verl.compute_gae_advantage_return(token_rewards, pad(values), pad(mask), gamma, lambd)
    advantages, returns = gae(rewards, values, mask, lengths, gamma=gamma, lambd=lambd, kl=kl, kl_coef=0.2)
    ours = whiten(advantages, mask), returns
    for got, want in zip(ours, theirs, strict=True):
        assert got[mask > 0].tolist() == pytest.approx(want[keep].tolist(), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_oracle_verl_value_loss(verl, seed):
    """verl's has a factor 1/2; value and gradient, mean over all tokens."""
    torch.manual_seed(seed)
    rows, mask = masks_of(seed)
    old, target = torch.randn(len(mask)).double(), torch.randn(len(mask)).double()
    values = (old + 0.3 * torch.randn(len(mask)).double()).requires_grad_()
    theirs, _ = verl.compute_value_loss(values[None], target[None], old[None], mask[None], 0.2)
    (their_slope,) = torch.autograd.grad(theirs, values)
    weights = loss_weights(mask, [len(row) for row in rows], [0] * 6, per_token=True)
    ours = (weights * value_loss(values, old, target, value_clip=0.2).loss).sum()
    (our_slope,) = torch.autograd.grad(ours, values)
    assert float(ours.detach()) == pytest.approx(2 * float(theirs.detach()), **CLOSE)
    assert our_slope.tolist() == pytest.approx((2 * their_slope).tolist(), **CLOSE)

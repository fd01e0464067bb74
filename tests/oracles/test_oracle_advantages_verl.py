"""The advantage estimators against verl's own functions, where verl 0.9.1 is installed beside instep.

TRL has no functions of its own for them: GRPOTrainer and RLOOTrainer compute them inside their rollout methods.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from instep.algorithms.advantages.groups import dr_grpo, grpo, rloo
from instep.algorithms.advantages.tokens import (
    penalised_rewards,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)
from instep.algorithms.segments import expand

pytestmark = pytest.mark.peers
CLOSE = {"rel": 1e-6, "abs": 1e-9}


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")


class Rollout:
    """Ragged columns, and the same padded; every response has a trained token, its reward stands at the last one."""

    def __init__(self, seed: int, kl_coef: float = 0.0):
        rng = random.Random(seed)
        self.groups = [g for g in (4, 0, 9) for _ in range(rng.randint(2, 6))]
        rng.shuffle(self.groups)
        n = len(self.groups)
        masks = [[int(rng.random() < 0.7) for _ in range(rng.randint(0, 8))] + [1] for _ in range(n)]
        for mask in masks[::3]:
            mask.extend([0, 0])  # ends with a tool's tokens
        self.lengths, self.kl_coef = [len(m) for m in masks], kl_coef
        self.mask = torch.tensor([x for m in masks for x in m], dtype=torch.float64)
        self.kl = torch.tensor([rng.gauss(0.1, 0.3) for _ in self.mask], dtype=torch.float64)
        self.rewards = torch.tensor([rng.choice((0.0, 1.0, rng.random())) for _ in range(n)], dtype=torch.float64)
        self.padded_mask = self.pad(self.mask)
        self.token_rewards = -kl_coef * self.pad(self.kl) * self.padded_mask
        for i, mask in enumerate(masks):
            self.token_rewards[i, max(t for t, m in enumerate(mask) if m)] += self.rewards[i]

    def pad(self, flat):
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(self.lengths)), batch_first=True)

    def trained(self, padded):
        return padded[self.padded_mask > 0].tolist()

    def trained_flat(self, flat):
        return flat[self.mask > 0].tolist()

    @property
    def penalised(self):
        return penalised_rewards(self.rewards, self.kl, self.mask, self.lengths, self.kl_coef)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_oracle_verl_group_relative(verl, seed, kl_coef):
    r = Rollout(seed, kl_coef)
    index = np.array(r.groups)
    functions = [
        (grpo, lambda: verl.compute_grpo_outcome_advantage(r.token_rewards.clone(), r.padded_mask, index)),
        (
            dr_grpo,
            lambda: verl.compute_grpo_outcome_advantage(
                r.token_rewards.clone(), r.padded_mask, index, norm_adv_by_std_in_grpo=False
            ),
        ),
        (rloo, lambda: verl.compute_rloo_outcome_advantage(r.token_rewards.clone(), r.padded_mask, index)),
        (rloo, lambda: verl.compute_rloo_vectorized_outcome_advantage(r.token_rewards.clone(), r.padded_mask, index)),
    ]
    for ours, theirs in functions:
        got = expand(ours(r.penalised, r.groups), r.lengths)
        assert r.trained_flat(got) == pytest.approx(r.trained(theirs()[0]), **CLOSE), ours.__name__


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_oracle_verl_reinforce_plus_plus(verl, seed, gamma):
    r = Rollout(seed, 0.2)
    config = type("Config", (), {"gamma": gamma})
    advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(r.token_rewards, r.padded_mask, config)
    got = reinforce_plus_plus(r.rewards, r.mask, r.lengths, kl=r.kl, kl_coef=0.2, gamma=gamma)
    assert r.trained_flat(got) == pytest.approx(r.trained(returns), **CLOSE)
    assert r.trained_flat(whiten(got, r.mask)) == pytest.approx(r.trained(advantages), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_oracle_verl_reinforce_plus_plus_baseline(verl, seed):
    r = Rollout(seed)  # verl compares rewards less their KL; here each token bears its own
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        r.token_rewards, r.padded_mask, np.array(r.groups)
    )
    got = whiten(reinforce_plus_plus_baseline(dr_grpo(r.rewards, r.groups), r.lengths), r.mask)
    assert r.trained_flat(got) == pytest.approx(r.trained(theirs), **CLOSE)

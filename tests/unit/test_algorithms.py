"""Each formula against a slow transcription in plain Python, in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from instep.algorithms.advantages.groups import dr_grpo, grpo
from instep.algorithms.advantages.tokens import penalised_rewards, whiten
from instep.algorithms.kl import KL_TYPES, approx_kl
from instep.algorithms.losses.forms import ppo_clip_loss
from instep.algorithms.reductions import loss_weights
from instep.algorithms.segments import expand
from tests.ragged import IDS, LENGTHS, MASK, STEPS, TOLERANCE, numbers, tensor

# --- advantages ---------------------------------------------------------------------------------------------------


def test_oracle_group_advantages_by_index_in_any_order():
    rewards = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0, 0.25]
    groups = [7, 3, 7, 3, 7, 3, 3]
    order = [4, 0, 6, 2, 5, 1, 3]
    members = {g: [r for r, k in zip(rewards, groups, strict=True) if k == g] for g in (3, 7)}
    expected = [
        (r - statistics.mean(members[g])) / (statistics.stdev(members[g]) + 1e-6)
        for r, g in zip(rewards, groups, strict=True)
    ]
    got = grpo(tensor(rewards), groups)
    assert got.tolist() == pytest.approx(expected, **TOLERANCE)
    shuffled = grpo(tensor([rewards[i] for i in order]), [groups[i] for i in order])
    assert shuffled.tolist() == pytest.approx([expected[i] for i in order], **TOLERANCE)
    assert torch.equal(grpo(tensor(rewards), torch.tensor(groups)), got)
    centred = dr_grpo(tensor(rewards), groups)
    assert centred.tolist() == pytest.approx(
        [r - statistics.mean(members[g]) for r, g in zip(rewards, groups, strict=True)]
    )


def test_fan_out_siblings_count_once():
    rewards, groups, ids = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], ["x", "x", "x", None]
    got = grpo(tensor(rewards), groups, execution_ids=ids)
    std = statistics.stdev([1.0, 0.0])
    assert got.tolist() == pytest.approx([0.5 / (std + 1e-6)] * 3 + [-0.5 / (std + 1e-6)])
    assert got.tolist() != pytest.approx(grpo(tensor(rewards), groups).tolist())


def test_equal_rewards_give_exactly_zero_in_float32():
    rewards = torch.full((7,), 0.1)
    assert grpo(rewards, [0] * 7).abs().max() == 0.0
    assert grpo(rewards, [0] * 7).dtype == torch.float32


def test_a_group_of_one_is_named():
    with pytest.raises(ValueError, match="group 5 "):
        grpo(tensor([1.0, 0.0, 1.0]), [4, 4, 5])
    with pytest.raises(ValueError, match="group 4 "):
        grpo(tensor([1.0, 0.0]), [4, 4], execution_ids=["x", "x"])
    with pytest.raises(ValueError, match="2 group indices"):
        grpo(tensor([1.0, 0.0, 1.0]), [4, 4])


def test_penalised_rewards():
    kl, mask = numbers(6, 1), [1, 0, 1, 1, 0, 1]
    kl[1] = math.nan  # masked out: must not matter
    got = penalised_rewards(tensor([1.0, 2.0]), tensor(kl), tensor(mask), [2, 4], 0.5)
    expected = [1.0 - 0.5 * kl[0], 2.0 - 0.5 * (kl[2] + kl[3] + kl[5])]
    assert got.tolist() == pytest.approx(expected, **TOLERANCE)


def test_whitening_ignores_masked_tokens():
    values, mask = numbers(9, 2, 3.0), [1, 1, 0, 1, 0, 1, 1, 0, 1]
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean, variance = statistics.mean(kept), statistics.variance(kept)
    expected = [(v - mean) / math.sqrt(variance + 1e-8) for v in values]
    assert whiten(tensor(values), tensor(mask)).tolist() == pytest.approx(expected, **TOLERANCE)
    assert whiten(tensor([5.0, 7.0]), tensor([1, 0])).tolist() == pytest.approx([0.0, 2.0 / math.sqrt(1e-8)])
    with pytest.raises(ValueError, match="at least one token"):
        whiten(tensor(values), tensor([0] * 9))


def test_expand():
    for lengths in ([2, 1, 3], torch.tensor([2, 1, 3])):
        assert expand(tensor([1.0, 2.0, 3.0]), lengths).tolist() == [1, 1, 2, 3, 3, 3]


# --- per-token formulas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_stays_finite_in_float32(kind: str):
    x = torch.tensor([-200.0, 0.0], requires_grad=True)
    loss = approx_kl(x, torch.tensor([0.0, -200.0]), kind)
    loss.sum().backward()
    assert loss.isfinite().all() and x.grad.isfinite().all()


def test_an_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="k9"):
        approx_kl(tensor([0.0]), tensor([0.0]), "k9")


def test_dual_clip_bounds_the_loss():
    loss = ppo_clip_loss(tensor([3.0]), tensor([0.0]), tensor([-1.0]), eps_clip=0.2, eps_clip_c=3.0).loss
    assert loss.item() == 3.0  # the ratio is 20


# --- reductions ---------------------------------------------------------------------------------------------------


def scalar_loss(token_loss: list[float], mask: list[int], step: int, per_token: bool) -> float:
    """The mean over a step's executions of the token mean of each; or the token mean of the step."""
    position, found = 0, {}
    for i, (length, s, execution) in enumerate(zip(LENGTHS, STEPS, IDS, strict=True)):
        rows = range(position, position + length)
        position += length
        if s == step:
            found.setdefault(execution or i, []).extend(rows)
    if per_token:
        kept = [t for rows in found.values() for t in rows if mask[t]]
        return sum(token_loss[t] for t in kept) / max(len(kept), 1)
    means = []
    for rows in found.values():
        kept = [t for t in rows if mask[t]]
        means.append(sum(token_loss[t] for t in kept) / max(len(kept), 1))
    return sum(means) / len(found)


@pytest.mark.parametrize("per_token", [False, True])
def test_oracle_loss_weights(per_token: bool):
    losses = numbers(17, 11)
    weights = loss_weights(torch.tensor(MASK).double(), LENGTHS, STEPS, IDS, per_token=per_token)
    as_tensors = loss_weights(torch.tensor(MASK).double(), torch.tensor(LENGTHS), STEPS, IDS, per_token=per_token)
    assert torch.equal(as_tensors, weights)
    for step, rows in ((0, slice(0, 8)), (1, slice(8, 17))):
        got = (weights * tensor(losses))[rows].sum().item()
        assert got == pytest.approx(scalar_loss(losses, MASK, step, per_token), **TOLERANCE)
    assert weights[torch.tensor(MASK) == 0].abs().max() == 0
    # two of three executions of step 1 have tokens: the masked one counts in the denominator
    assert weights[8:].sum().item() == pytest.approx(1.0 if per_token else 2 / 3)


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_weights_are_rounded_once(per_token: bool):
    """In float32 they are those of float64, rounded, to the bit."""
    exact = loss_weights(torch.tensor(MASK).double(), LENGTHS, STEPS, IDS, per_token=per_token)
    got = loss_weights(torch.tensor(MASK).float(), LENGTHS, STEPS, IDS, per_token=per_token)
    assert got.dtype == torch.float32 and torch.equal(got, exact.float())


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_weights_do_not_depend_on_the_order(per_token: bool):
    mask = torch.tensor(MASK).double()
    weights = loss_weights(mask, LENGTHS, STEPS, IDS, per_token=per_token)
    order = [5, 2, 0, 3, 1, 4]
    moved = torch.cat([mask.split(LENGTHS)[i] for i in order])
    lengths, steps, ids = ([column[i] for i in order] for column in (LENGTHS, STEPS, IDS))
    got = loss_weights(moved, lengths, steps, ids, per_token=per_token)
    assert torch.equal(got, torch.cat([weights.split(LENGTHS)[i] for i in order]))


def test_loss_weights_of_samples_outside_a_step_and_split_executions():
    weights = loss_weights(torch.ones(3), [1, 2], [-1, 0])
    assert weights.tolist() == [0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="split over steps"):
        loss_weights(torch.ones(2), [1, 1], [0, 1], ["x", "x"])
    with pytest.raises(ValueError, match="do not fit"):
        loss_weights(torch.ones(2), [1, 2], [0, 0])

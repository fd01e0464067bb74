"""Losses of data (DPO, SFT), distillation and sums over samples against scalar transcriptions, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from instep.algorithms.advantages.tokens import distilled_advantages
from instep.algorithms.losses.offline import dpo_loss, sft_loss
from instep.algorithms.segments import segment_sum
from tests.oracles import losses as oracle
from tests.oracles.test_oracle_losses import CLOSE, EXACT, column, token_batch


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_oracle_of_dpo(smoothing: float):
    rng = random.Random(9)
    rows = [[rng.uniform(-8, -1) for _ in range(12)] for _ in range(4)]
    tensors = [torch.tensor(r, dtype=torch.float64, requires_grad=True) for r in rows]
    got = dpo_loss(*tensors, beta=0.3, label_smoothing=smoothing)
    got.loss.mean().backward()

    def value(pair: list[list[float]]) -> float:
        columns = zip(*pair, *rows[2:], strict=True)
        return sum(oracle.scalar_dpo(*values, 0.3, smoothing) for values in columns) / 12

    assert got.loss.mean().item() == pytest.approx(value(rows[:2]), **EXACT)
    for tensor, grad in zip(tensors[:2], oracle.slopes(value, rows[:2]), strict=True):
        assert tensor.grad.tolist() == pytest.approx(grad, **CLOSE)
    assert tensors[2].grad is None and tensors[3].grad is None
    margins = (got.chosen_rewards - got.rejected_rewards).tolist()
    assert margins == pytest.approx([0.3 * (c - rc - r + rr) for c, r, rc, rr in zip(*rows, strict=True)])


def test_dpo_refuses_what_makes_no_sense_and_stays_finite_far_away():
    zeros = torch.zeros(1)
    for wrong in ({"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}):
        with pytest.raises(ValueError, match="label_smoothing"):
            dpo_loss(zeros, zeros, zeros, zeros, **wrong)
    far = torch.tensor([-9e3], requires_grad=True)
    out = dpo_loss(far, zeros, zeros, zeros).loss
    out.backward()
    assert out.item() == pytest.approx(900.0) and far.grad.item() == pytest.approx(-0.1)


@pytest.mark.parametrize("per_token", [False, True])
def test_oracle_of_sft(per_token: bool):
    batch = oracle.responses(11)
    point = [r.current for r in batch]
    x = column(point).requires_grad_()
    out = sft_loss(x, token_batch(batch, per_token).token_columns["loss_weights"])
    out.backward()

    def value(values: list[list[float]]) -> float:
        return oracle.objective(batch, values, values, lambda r, lp, _: [-v for v in lp], per_token)

    assert out.item() == pytest.approx(value(point), **EXACT)
    assert x.grad.tolist() == pytest.approx([g for row in oracle.slopes(value, point) for g in row], **CLOSE)


def test_oracle_of_distillation():
    rng = random.Random(13)
    adv, student, teacher = ([rng.gauss(0, 1) for _ in range(20)] for _ in range(3))
    tensors = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (adv, student, teacher)]
    got = distilled_advantages(*tensors, 0.7)
    expected = [a - 0.7 * oracle.scalar_kl(s, t, "k1") for a, s, t in zip(adv, student, teacher, strict=True)]
    assert got.tolist() == pytest.approx(expected, **EXACT) and not got.requires_grad


def test_oracle_of_sums_over_samples():
    batch = oracle.responses(17)
    values = [r.current for r in batch]
    got = segment_sum(column(values), column([r.mask for r in batch]), [len(r.mask) for r in batch])
    assert got.tolist() == pytest.approx([sum(r.current[t] for t in r.kept) for r in batch], **EXACT)
    empty = segment_sum(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]), [0, 2, 0])
    assert empty.tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="3 tokens for response lengths with the sum 2"):
        segment_sum(torch.ones(3), torch.ones(3), [1, 1])
    with pytest.raises(ValueError, match="a mask of 2 entries for 3 tokens"):
        segment_sum(torch.ones(3), torch.ones(2), [3])

"""Every loss and correction against a scalar transcription of its paper, value and gradient, in float64."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch

from instep.algorithms.kl import KL_TYPES, approx_kl
from instep.algorithms.losses.forms import binary_divergence, dppo_loss, gspo_loss, ppo_clip_loss
from instep.algorithms.losses.policy import PolicyLossConfig
from instep.algorithms.reductions import loss_weights
from instep.training.backend import LossOutput, TokenOutputs
from instep.training.losses import policy_loss_fn
from instep.types import TokenBatch
from tests.oracles import losses as oracle
from tests.oracles.losses import Response

EXACT = {"abs": 1e-9, "rel": 1e-9}
CLOSE = {"abs": 1e-7, "rel": 1e-6}  # of the central differences


def column(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def token_batch(batch: list[Response], per_token: bool, constant: int | None = None) -> TokenBatch:
    lengths = [len(r.mask) for r in batch]
    columns = {
        "loss_weights": loss_weights(
            column([r.mask for r in batch]),
            lengths,
            [r.step for r in batch],
            [r.execution for r in batch],
            per_token=per_token,
            constant_length=constant,
        ),
        "advantages": column([[r.advantage] * len(r.mask) for r in batch]),
        "log_probs": column([r.old for r in batch]),
        "ref_log_probs": column([r.ref for r in batch]),
        "rollout_log_probs": column([r.engine for r in batch]),
    }
    sizes = torch.tensor(lengths)
    return TokenBatch(torch.zeros(int(sizes.sum()) + len(batch)).long(), sizes + 1, sizes, columns)


class Compared(NamedTuple):
    """The trainer's loss, then its gradient by token, and the transcription's."""

    batch: list[Response]
    out: LossOutput
    ours: list[float]
    theirs: list[Any]


def compared(
    config: PolicyLossConfig,
    loss: oracle.TokenLoss,
    seed: int,
    per_token: bool,
    *,
    recomputed: bool = True,
    constant: int | None = None,
):
    batch = oracle.responses(seed)
    ours = token_batch(batch, per_token, constant)
    if not recomputed:
        del ours.token_columns["log_probs"]
    point = [r.current for r in batch]
    x = column(point).requires_grad_()
    out = policy_loss_fn(config)(ours, TokenOutputs(x))
    out.loss.backward()

    def value(values: list[list[float]]) -> float:
        return oracle.objective(batch, values, point, loss, per_token, constant)

    slopes = [g for row in oracle.slopes(value, point) for g in row]
    assert max(map(abs, slopes)) > 1e-3
    theirs = [pytest.approx(value(point), **EXACT), *(pytest.approx(g, **CLOSE) for g in slopes)]
    return Compared(batch, out, [out.loss.item(), *x.grad.tolist()], theirs)


FORMS = {
    "grpo": (PolicyLossConfig(eps_clip=0.2), oracle.ppo(0.2, 0.2)),
    "grpo, clip-higher": (PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.28), oracle.ppo(0.2, 0.28)),
    "grpo, dual clip": (PolicyLossConfig(eps_clip=0.2, eps_clip_c=1.25), oracle.ppo(0.2, 0.2, 1.25)),
    "gspo": (
        PolicyLossConfig(form="gspo", eps_clip=0.05, eps_clip_high=0.1),
        oracle.gspo(0.05, 0.1),
    ),
    "gspo, dual clip": (
        PolicyLossConfig(form="gspo", eps_clip=0.01, eps_clip_high=0.02, eps_clip_c=1.05),
        oracle.gspo(0.01, 0.02, 1.05),
    ),
    "cispo": (PolicyLossConfig(form="cispo", eps_clip=1, eps_clip_high=0.3), oracle.cispo(1, 0.3)),
    "cispo, two-sided": (
        PolicyLossConfig(form="cispo", eps_clip=0.2, eps_clip_high=0.3),
        oracle.cispo(0.2, 0.3),
    ),
    "sapo": (PolicyLossConfig(form="sapo"), oracle.sapo(1.0, 1.05)),
    "sapo, sharp": (
        PolicyLossConfig(form="sapo", sapo_tau_pos=3, sapo_tau_neg=7),
        oracle.sapo(3, 7),
    ),
    "dppo tv": (
        PolicyLossConfig(form="dppo_tv", use_rollout_logprobs=True, eps_clip=0.05),
        oracle.dppo("tv", 0.05, 0.05),
    ),
    "dppo kl, two thresholds": (
        PolicyLossConfig(form="dppo_kl", use_rollout_logprobs=True, eps_clip=0.002, eps_clip_high=0.02),
        oracle.dppo("kl", 0.002, 0.02),
    ),
    "dppo tv, bounded ratio": (
        PolicyLossConfig(form="dppo_tv", use_rollout_logprobs=True, eps_clip=0.1, eps_clip_high=0.05, eps_clip_c=1.1),
        oracle.dppo("tv", 0.1, 0.05, 1.1),
    ),
}


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", FORMS)
def test_oracle_of_each_form(form: str, seed: int, per_token: bool):
    found = compared(*FORMS[form], seed, per_token)
    assert found.ours == found.theirs


def test_oracle_data_reach_both_sides_of_every_bound():
    for form in (name for name in FORMS if not name.startswith("sapo")):
        shares = [compared(*FORMS[form], seed, True).out.sums["pg_clipfrac"].item() / 2 for seed in range(4)]
        assert 0.05 < sum(shares) / 4 < 0.95, (form, shares)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", FORMS)
def test_oracle_of_each_form_over_a_constant_length(form: str, seed: int):
    found = compared(*FORMS[form], seed, False, constant=5)
    assert found.ours == found.theirs


@pytest.mark.parametrize("per_token", [False, True])
def test_oracle_gspo_is_the_gradient_of_the_sequence_objective_with_per_token_advantages_of_their_own(per_token: bool):
    """GSPO-token (arXiv:2507.18071): the ratio's value is the sequence's, the gradient is the token's."""
    batch = oracle.responses(7)
    ours = token_batch(batch, per_token)
    rng = random.Random(1)
    advantages = [[rng.gauss(0, 1) for _ in r.mask] for r in batch]
    w = ours.token_columns["loss_weights"].split(ours.response_lengths.tolist())
    x = column([r.current for r in batch]).requires_grad_()
    mask = column([r.mask for r in batch])
    out = gspo_loss(
        x, column([r.old for r in batch]), column(advantages), mask, ours.response_lengths,
        eps_clip=0.1, eps_clip_high=0.1,
    )  # fmt: skip
    (out.loss * ours.token_columns["loss_weights"]).sum().backward()
    grads = x.grad.split(ours.response_lengths.tolist())
    for r, a, weights, grad in zip(batch, advantages, w, grads, strict=True):
        s = math.exp(sum(r.current[t] - r.old[t] for t in r.kept) / max(len(r.kept), 1))
        for t in r.kept:
            clipped = s > 1.1 if a[t] > 0 else s < 0.9
            assert grad[t].item() == pytest.approx(0.0 if clipped else -weights[t].item() * s * a[t], **CLOSE)


LEVELS = ("token", "sequence", "geometric")


@pytest.mark.parametrize("recomputed", [True, False], ids=["old log-probs", "one step"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_oracle_of_importance_weights(level: str, mode: str, recomputed: bool):
    low, high = (0.8, 1.2) if level != "sequence" else (0.5, 1.5)
    config = PolicyLossConfig(use_tis=True, tis_level=level, tis_mode=mode, tis_clip_low=low, tis_clip=high)
    plain = oracle.ppo(0.2, 0.2) if recomputed else oracle_of_one_step
    shares = []
    for seed in range(3):
        loss = oracle.weighted(plain, level, mode, low, high, recomputed=recomputed)
        batch, out, ours, theirs = compared(config, loss, seed, per_token=seed == 1, recomputed=recomputed)
        assert ours == theirs
        raw = [oracle.level_ratios(r, r.old if recomputed else r.current, level) for r in batch]
        expected = oracle.objective(batch, raw, raw, lambda r, v, _: v, per_token=seed == 1)
        assert out.sums["tis"].item() == pytest.approx(expected, **EXACT)
        shares.append(out.sums["tis_clipfrac"].item() / 2)
    assert 0.02 < sum(shares) / 3 < 0.98, shares


@pytest.mark.parametrize("seed", range(3))
def test_oracle_of_decoupled_ppo(seed: int):
    config = PolicyLossConfig(use_tis=True, tis_mode="truncate", tis_clip=1e6)
    found = compared(config, oracle.decoupled_ppo(0.2), seed, per_token=True)
    assert found.ours == found.theirs


def oracle_of_one_step(r: Response, lp: list[float], frozen: list[float]) -> list[float]:
    """The ratio's base is the policy itself: value A, gradient A."""
    return [-math.exp(x - f) * r.advantage for x, f in zip(lp, frozen, strict=True)]


@pytest.mark.parametrize("form", ["gspo", "cispo", "sapo"])
def test_oracle_of_other_forms_with_sequence_weights(form: str):
    config, loss = FORMS[form]
    values = {**vars(config), "use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_clip_low": 0.3}
    found = compared(
        PolicyLossConfig(**values), oracle.weighted(loss, "sequence", "mask", 0.3, 2.0), 2, per_token=False
    )
    assert found.ours == found.theirs


GSPO_GRADIENTS = {"token": oracle.gspo_token(0.05, 0.1), "sequence": oracle.gspo(0.05, 0.1)}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("gradient", GSPO_GRADIENTS)
def test_oracle_of_gspo_with_weights_of_tokens(gradient: str, per_token: bool):
    """Token weights tell the two forms apart: each token's own weight, or the mean over its response."""
    base = PolicyLossConfig(form="gspo", eps_clip=0.05, eps_clip_high=0.1, gspo_gradient=gradient)
    loss, mask = GSPO_GRADIENTS[gradient], {"tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25}
    for seed in range(3):
        tis = PolicyLossConfig(**{**vars(base), "use_tis": True, **mask})
        weighted = compared(tis, oracle.weighted(loss, "token", "mask", 0.8, 1.25), seed, per_token)
        assert weighted.ours == weighted.theirs
        rejects = PolicyLossConfig(**{**vars(base), "use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.3})
        rejected = compared(rejects, oracle.rejected(loss, "token", 0.7, 1.3, None), seed, per_token)
        assert rejected.ours == rejected.theirs
        plain = compared(base, FORMS["gspo"][1], seed, per_token)
        assert plain.ours == plain.theirs  # without weights they are one


@pytest.mark.parametrize("veto", [None, 0.55])
@pytest.mark.parametrize("level", LEVELS)
def test_oracle_of_rejection(level: str, veto: float | None):
    low, high = {"token": (0.7, 1.3), "sequence": (0.5, 1.6), "geometric": (0.85, 1.2)}[level]
    config = PolicyLossConfig(
        use_rs=True, rs_level=level, rs_lower_bound=low, rs_upper_bound=high, rs_veto_threshold=veto
    )
    loss = oracle.rejected(oracle.ppo(0.2, 0.2), level, low, high, veto)
    found = [compared(config, loss, seed, seed == 1) for seed in (0, 1, 4)]
    assert all(one.ours == one.theirs for one in found)
    shares = [one.out.sums["rs_clipfrac"].item() / 2 for one in found]
    assert 0.02 < sum(shares) / 3 < 0.98


def test_oracle_of_rejection_beside_weights():
    config = PolicyLossConfig(use_tis=True, tis_clip=1.1, use_rs=True, rs_lower_bound=0.6, rs_upper_bound=1.4)
    loss = oracle.rejected(oracle.weighted(oracle.ppo(0.2, 0.2), "token", "clip", 0, 1.1), "token", 0.6, 1.4, None)
    found = compared(config, loss, 1, per_token=False)
    assert found.ours == found.theirs


@pytest.mark.parametrize("form", ["grpo", "gspo"])
def test_oracle_of_off_policy_sequence_masking(form: str):
    config, loss = FORMS[form]
    config = PolicyLossConfig(**{**vars(config), "use_opsm": True, "opsm_delta": 0.03})
    found = [compared(config, oracle.sequence_masked(loss, 0.03), seed, False) for seed in range(4)]
    assert all(one.ours == one.theirs for one in found)
    shares = [one.out.sums["opsm_clipfrac"].item() for one in found]
    assert max(shares) > 0.1 and min(shares) < 1


def test_oracle_of_kl_and_entropy_in_the_loss():
    config = PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", use_unbiased_kl=True)

    def loss(r: Response, lp: list[float], frozen: list[float]) -> list[float]:
        pg = oracle.ppo(0.2, 0.2)(r, lp, frozen)
        return [p + 0.3 * oracle.scalar_kl(x, b, "k3", o) for p, x, b, o in zip(pg, lp, r.ref, r.old, strict=True)]

    for per_token in (False, True):
        found = compared(config, loss, 3, per_token)
        assert found.ours == found.theirs


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_oracle_of_kl(kind: str, unbiased: bool):
    rng = random.Random(3)
    lp, base = ([rng.gauss(0, 2) for _ in range(40)] for _ in range(2))
    old = [x + rng.gauss(0, 0.3) for x in lp] if unbiased else [None] * 40
    x = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    base_tensor = torch.tensor(base, dtype=torch.float64)
    got = approx_kl(x, base_tensor, kind, old_log_probs=torch.tensor(old, dtype=torch.float64) if unbiased else None)
    got.sum().backward()

    def value(rows: list[list[float]]) -> float:
        return sum(oracle.scalar_kl(v, b, kind, o) for v, b, o in zip(rows[0], base, old, strict=True))

    assert got.tolist() == pytest.approx([value_of(v, b, kind, o) for v, b, o in zip(lp, base, old, strict=True)])
    assert x.grad.tolist() == pytest.approx(oracle.slopes(value, [lp])[0], abs=1e-6, rel=1e-6)
    if kind == "low_var_kl":
        assert got.max().item() == 10.0  # the clamp is reached by this data


value_of = oracle.scalar_kl


@pytest.mark.parametrize(("high", "c"), [(None, None), (0.28, None), (0.28, 1.5)])
def test_oracle_of_ppo_clip_per_token(high: float | None, c: float | None):
    rng = random.Random(6)
    lp, old = ([rng.gauss(0, 0.5) for _ in range(60)] for _ in range(2))
    adv = [rng.gauss(0, 1) for _ in range(60)]
    x = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    old_tensor, adv_tensor = (torch.tensor(v, dtype=torch.float64) for v in (old, adv))
    got = ppo_clip_loss(x, old_tensor, adv_tensor, eps_clip=0.2, eps_clip_high=high, eps_clip_c=c)
    got.loss.sum().backward()
    upper = 0.2 if high is None else high

    def value(rows: list[list[float]]) -> float:
        return sum(oracle.scalar_ppo(v, o, a, 0.2, upper, c) for v, o, a in zip(rows[0], old, adv, strict=True))

    assert got.loss.sum().item() == pytest.approx(value([lp]), **EXACT)
    assert x.grad.tolist() == pytest.approx(oracle.slopes(value, [lp])[0], abs=1e-6)
    for i in range(60):
        ratio = math.exp(lp[i] - old[i])
        assert got.clipped[i].item() == float(ratio < 0.8 if adv[i] < 0 else ratio > 1 + upper)
        assert got.ppo_kl[i].item() == pytest.approx(old[i] - lp[i])
    assert 10 < got.clipped.sum() < 50


def moved_by(kind: str, delta: float, mu: float, sign: int) -> float:
    """The probability above (`sign` 1) or below (-1) `mu` whose divergence (arXiv:2602.04879, 13 or 14) is `delta`."""

    def divergence(p: float) -> float:
        if kind == "tv":
            return abs(mu - p)
        return mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p))

    near, far = mu, 1 - 1e-9 if sign > 0 else 1e-9
    for _ in range(200):
        middle = (near + far) / 2
        near, far = (middle, far) if divergence(middle) < delta else (near, middle)
    return near


@pytest.mark.parametrize("mu", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_oracle_of_dppo_at_the_borders_of_its_mask(kind: str, advantage: float, mu: float):
    """Beyond the threshold there is no gradient, short of it that of -r A; the way back is open however far it is."""
    low, high = {"tv": (0.05, 0.09), "kl": (0.01, 0.02)}[kind]
    sign = 1 if advantage > 0 else -1
    border = moved_by(kind, high if advantage > 0 else low, mu, sign)
    back = moved_by(kind, 0.09 if kind == "tv" else 0.3, mu, -sign)
    cases = ((border + sign * 1e-6, False), (border - sign * 1e-6, True), (mu, True), (back, True))
    p, kept = ([case[i] for case in cases] for i in range(2))
    x = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    engine = torch.full_like(x, math.log(mu), requires_grad=True)
    out = dppo_loss(x, engine, torch.full_like(x, advantage), divergence=kind, eps_clip=low, eps_clip_high=high)
    out.loss.sum().backward()
    expected = [-value / mu * advantage if k else 0.0 for value, k in zip(p, kept, strict=True)]
    assert x.grad.tolist() == pytest.approx(expected, **EXACT) and engine.grad is None
    assert out.clipped.tolist() == [float(not k) for k in kept]
    assert out.ppo_kl.tolist() == pytest.approx([math.log(mu / value) for value in p], **CLOSE)


def test_the_divergence_of_a_token_that_is_certain_in_float32_is_small_and_finite():
    now, before = torch.tensor([0.0, 0.0, -1e-6, 0.0, -60.0]), torch.tensor([0.0, -1e-6, 0.0, math.log(0.9), -0.1])
    got = binary_divergence(now, before, "kl")
    assert got[0] == 0 and got[1:3].abs().max() < 1e-4 and got[3:].min() > 0.05 and got.isfinite().all()
    assert binary_divergence(now, before, "tv")[3] == pytest.approx(0.1, abs=1e-6)
    with pytest.raises(ValueError, match="known are tv, kl"):
        binary_divergence(now, before, "k3")

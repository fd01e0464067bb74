"""The whole policy loss against a slow transcription in plain Python, value and gradient, in float64."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest
import torch

from instep.algorithms.losses.policy import PolicyLossConfig, policy_loss
from instep.algorithms.reductions import loss_weights
from instep.errors import RolloutError
from instep.training.backend import TokenOutputs
from instep.training.losses import finish_metrics, policy_loss_fn, sft_loss_fn
from instep.types import TokenBatch
from tests.oracles.losses import scalar_kl, scalar_ppo
from tests.ragged import IDS, LENGTHS, MASK, TOLERANCE, numbers, tensor


def slope(function, values: list[float], i: int, h: float = 1e-6) -> float:
    up, down = list(values), list(values)
    up[i] += h
    down[i] -= h
    return (function(up) - function(down)) / (2 * h)


def make_batch(n: int = 17, seed: int = 20, nan_rows: tuple[int, ...] = ()) -> tuple[TokenBatch, list[float]]:
    current = [-abs(x) - 0.1 for x in numbers(n, seed)]
    columns = {
        "loss_weights": loss_weights(torch.tensor(MASK).double(), LENGTHS, [0] * 6, IDS),
        "advantages": tensor(numbers(n, seed + 1)),
        "log_probs": tensor([c + d for c, d in zip(current, numbers(n, seed + 2, 0.3), strict=True)]),
        "ref_log_probs": tensor([c + d for c, d in zip(current, numbers(n, seed + 3, 0.5), strict=True)]),
        "rollout_log_probs": tensor([c + d for c, d in zip(current, numbers(n, seed + 4, 0.4), strict=True)]),
    }
    parts = list(columns["rollout_log_probs"].split(LENGTHS))
    for row in nan_rows:
        parts[row] = torch.full_like(parts[row], math.nan)
    columns["rollout_log_probs"] = torch.cat(parts)
    lengths = torch.tensor(LENGTHS)
    tokens = torch.arange(int(lengths.sum()) + 6)
    return TokenBatch(tokens, lengths + 1, lengths, columns, {"index": torch.arange(10, 16)}), current


FULL = PolicyLossConfig(
    eps_clip=0.2,
    eps_clip_high=0.28,
    eps_clip_c=3.0,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    kl_loss_type="low_var_kl",
    use_unbiased_kl=True,
    entropy_coef=0.01,
    use_tis=True,
    tis_clip=1.3,
    tis_clip_low=0.8,
)


def test_effective_sample_size_is_kish_s_of_tokens_with_engine_log_probs() -> None:
    """(sum w)^2 / (n sum w^2) in plain Python, older tokens among them; 1 where both policies are one."""
    batch, current = make_batch(nan_rows=(1,))
    columns = batch.token_columns
    rows = [columns[name].tolist() for name in ("loss_weights", "log_probs", "rollout_log_probs")]
    known = [(w, math.exp(old - engine)) for w, old, engine in zip(*rows, strict=True) if w > 0 and engine == engine]
    first, second = (sum(w * ratio**power for w, ratio in known) for power in (1, 2))
    expected = first**2 / (sum(w for w, _ in known) * second)
    columns["older"] = torch.ones(len(current), dtype=torch.float64)

    def measured() -> float:
        out = policy_loss_fn(PolicyLossConfig())(batch, TokenOutputs(tensor(current)))
        return finish_metrics(*({n: v.item() for n, v in group.items()} for group in (out.sums, out.maxes)))[
            "effective_sample_ratio"
        ]

    assert measured() == pytest.approx(expected, rel=1e-12) and 0.5 < expected < 1
    columns["log_probs"] = columns["rollout_log_probs"].nan_to_num(-1.0)
    assert measured() == pytest.approx(1.0, rel=1e-12)


def test_oracle_policy_loss_value_gradient_and_metrics():
    batch, current = make_batch()
    c = {k: v.tolist() for k, v in batch.token_columns.items()}
    entropies = [abs(x) for x in numbers(17, 30)]

    def oracle(values: list[float], part: str = "loss") -> float:
        total = 0.0
        for t, lp in enumerate(values):
            raw = math.exp(c["log_probs"][t] - c["rollout_log_probs"][t])
            weight = min(max(raw, 0.8), 1.3)
            pg = weight * scalar_ppo(lp, c["log_probs"][t], c["advantages"][t], 0.2, 0.28, 3.0)
            kl = scalar_kl(lp, c["ref_log_probs"][t], "low_var_kl", c["log_probs"][t])
            gap = c["log_probs"][t] - c["rollout_log_probs"][t]
            terms = {
                "loss": pg + 0.1 * kl - 0.01 * entropies[t],
                "pg_loss": pg,
                "kl_loss": kl,
                "entropy": entropies[t],
                "log_prob": lp,
                "ppo_kl": c["log_probs"][t] - lp,
                "tis": raw,
                "tis_clipfrac": float(not 0.8 <= raw <= 1.3),
                "log_prob_gap_mean": abs(gap),
                "engine_kl": math.exp(gap) - 1 - gap,
            }
            total += c["loss_weights"][t] * terms[part]
        return total

    x, h = tensor(current, grad=True), tensor(entropies, grad=True)
    out = policy_loss_fn(FULL)(batch, TokenOutputs(x, h))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(oracle(current), **TOLERANCE)
    for t in range(17):
        assert x.grad[t].item() == pytest.approx(slope(oracle, current, t), abs=1e-7, rel=1e-6)
        assert h.grad[t].item() == pytest.approx(-0.01 * c["loss_weights"][t], **TOLERANCE)
    for name in ("pg_loss", "kl_loss", "entropy", "log_prob", "ppo_kl", "tis", "tis_clipfrac"):
        assert out.sums[name].item() == pytest.approx(oracle(current, name), **TOLERANCE), name
        assert not out.sums[name].requires_grad
    done = finish_metrics({k: v.item() for k, v in out.sums.items()}, {k: v.item() for k, v in out.maxes.items()})
    total = sum(c["loss_weights"])
    for name in ("log_prob_gap_mean", "engine_kl"):
        assert done[name] == pytest.approx(oracle(current, name) / total, **TOLERANCE)
    gaps = [abs(a - b) for a, b, m in zip(c["log_probs"], c["rollout_log_probs"], MASK, strict=True) if m]
    assert done["log_prob_gap_max"] == pytest.approx(max(gaps))
    assert done["log_prob_gap_coverage"] == pytest.approx(1.0)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5]], [[5, 0], [3], [4, 1, 2]], [[0], [1], [2], [3], [4], [5]]])
def test_micro_batches_add_up_to_the_same_loss_gradient_and_metrics(parts: list[list[int]]):
    batch, current = make_batch()
    whole = tensor(current, grad=True)
    expected = policy_loss_fn(FULL)(batch, TokenOutputs(whole, -whole.detach()))
    expected.loss.backward()
    x = tensor(current, grad=True)
    pieces = x.split(LENGTHS)
    outs = []
    for part in parts:
        micro = torch.cat([pieces[i] for i in part])
        outs.append(policy_loss_fn(FULL)(batch.select(part), TokenOutputs(micro, -micro.detach())))
    sum(o.loss for o in outs).backward()
    assert torch.allclose(x.grad, whole.grad, rtol=1e-12, atol=1e-14)
    for name, value in expected.sums.items():
        assert sum(o.sums[name].item() for o in outs) == pytest.approx(value.item(), **TOLERANCE), name
    assert max(o.maxes["log_prob_gap_max"].item() for o in outs) == expected.maxes["log_prob_gap_max"].item()


def test_samples_without_engine_log_probs_leave_the_gap_of_the_others():
    config = PolicyLossConfig()
    batch, current = make_batch(nan_rows=(0, 2))
    x = tensor(current, grad=True)
    out = policy_loss_fn(config)(batch, TokenOutputs(x))
    out.loss.backward()
    assert x.grad.isfinite().all()
    c = {k: v.tolist() for k, v in batch.token_columns.items()}
    covered = [t for t in range(17) if MASK[t] and not math.isnan(c["rollout_log_probs"][t])]
    mass = sum(c["loss_weights"][t] for t in covered)
    mean = sum(c["loss_weights"][t] * abs(c["log_probs"][t] - c["rollout_log_probs"][t]) for t in covered) / mass
    done = finish_metrics({k: v.item() for k, v in out.sums.items()}, {k: v.item() for k, v in out.maxes.items()})
    assert done["log_prob_gap_mean"] == pytest.approx(mean, **TOLERANCE)
    assert done["log_prob_gap_coverage"] == pytest.approx(mass / sum(c["loss_weights"]), **TOLERANCE)
    assert 0 < done["log_prob_gap_coverage"] < 1
    none, _ = make_batch(nan_rows=(0, 1, 2, 3, 4, 5))
    out = policy_loss_fn(config)(none, TokenOutputs(x))
    done = finish_metrics({k: v.item() for k, v in out.sums.items()}, {k: v.item() for k, v in out.maxes.items()})
    assert done["log_prob_gap_coverage"] == 0
    assert not {"log_prob_gap_mean", "log_prob_gap_max", "engine_kl"} & set(done)


def test_tokens_of_weight_zero_poison_nothing():
    batch, current = make_batch()
    clean = tensor(current, grad=True)
    policy_loss_fn(FULL)(batch, TokenOutputs(clean, -clean.detach())).loss.backward()
    poisoned = [math.nan if not m else v for v, m in zip(current, MASK, strict=True)]
    for column in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs"):
        batch.token_columns[column][torch.tensor(MASK) == 0] = math.nan
    x = tensor(poisoned, grad=True)
    out = policy_loss_fn(FULL)(batch, TokenOutputs(x, -x.detach()))
    out.loss.backward()
    assert torch.equal(x.grad, clean.grad)
    assert all(v.isfinite() for v in [*out.sums.values(), *out.maxes.values()])


def test_without_old_log_probs_the_ratio_is_one_and_the_gap_is_that_of_the_current_ones():
    batch, current = make_batch()
    del batch.token_columns["log_probs"]
    x = tensor(current, grad=True)
    out = policy_loss_fn(PolicyLossConfig())(batch, TokenOutputs(x))
    out.loss.backward()
    c = {k: v.tolist() for k, v in batch.token_columns.items()}
    assert x.grad.tolist() == pytest.approx(
        [-w * a for w, a in zip(c["loss_weights"], c["advantages"], strict=True)], **TOLERANCE
    )
    assert out.sums["ppo_kl"].item() == 0 and out.sums["pg_clipfrac"].item() == 0
    gap = sum(w * abs(a - b) for w, a, b in zip(c["loss_weights"], current, c["rollout_log_probs"], strict=True))
    assert out.sums["log_prob_gap_mean"].item() == pytest.approx(gap, **TOLERANCE)


def test_metrics_that_are_means_are_divided_by_the_weights():
    """Weights add up to less than 1 where samples are masked out, to more with --constant-loss-length."""
    means = ["log_prob", "entropy", "pg_clipfrac", "ppo_kl", "kl_loss", "tis", "tis_clipfrac", "rs_clipfrac"]
    means += ["opsm_clipfrac", "value_clipfrac"]
    sums = {name: float(i + 1) for i, name in enumerate(means)}
    out = finish_metrics({**sums, "loss": 5.0, "pg_loss": 6.0, "loss_weight": 0.5}, {})
    assert out == {**{name: 2 * x for name, x in sums.items()}, "loss": 5.0, "pg_loss": 6.0, "loss_weight": 0.5}
    assert finish_metrics({**sums, "loss_weight": 0.0}, {})["ppo_kl"] == 4.0  # nothing to divide by


def test_use_rollout_logprobs_takes_the_engines_as_old_and_still_shows_the_gap():
    batch, current = make_batch()
    x = tensor(current, grad=True)
    out = policy_loss_fn(PolicyLossConfig(use_rollout_logprobs=True))(batch, TokenOutputs(x))
    c = {k: v.tolist() for k, v in batch.token_columns.items()}
    expected = sum(
        w * scalar_ppo(lp, old, a, 0.2, 0.2, None)
        for w, lp, old, a in zip(c["loss_weights"], current, c["rollout_log_probs"], c["advantages"], strict=True)
    )
    assert out.loss.item() == pytest.approx(expected, **TOLERANCE)
    assert out.sums["log_prob_gap_mean"].item() > 0.1


@pytest.mark.parametrize(
    ("column", "config"),
    [
        ("loss_weights", PolicyLossConfig()),
        ("advantages", PolicyLossConfig()),
        ("ref_log_probs", PolicyLossConfig(use_kl_loss=True)),
        ("rollout_log_probs", PolicyLossConfig(use_tis=True)),
        ("rollout_log_probs", PolicyLossConfig(use_rollout_logprobs=True)),
    ],
)
def test_a_missing_column_is_named(column: str, config: PolicyLossConfig):
    batch, current = make_batch()
    del batch.token_columns[column]
    with pytest.raises(RolloutError, match=column) as error:
        policy_loss_fn(config)(batch, TokenOutputs(tensor(current)))
    assert error.value.remedy


def test_tis_refuses_trained_tokens_without_engine_log_probs():
    batch, current = make_batch(nan_rows=(2,))
    with pytest.raises(RolloutError, match="3 trained tokens") as error:
        policy_loss_fn(PolicyLossConfig(use_tis=True))(batch, TokenOutputs(tensor(current)))
    assert "sample 12" in error.value.where


def test_sft_loss():
    batch, current = make_batch()
    x = tensor(current, grad=True)
    out = sft_loss_fn()(batch, TokenOutputs(x))
    out.loss.backward()
    weights = batch.token_columns["loss_weights"]
    assert out.loss.item() == pytest.approx(-(weights * tensor(current)).sum().item())
    assert torch.equal(x.grad, -weights)


def test_config_from_args_and_its_contradictions():
    values = {name: getattr(FULL, name) for name in FULL.__dataclass_fields__}
    run = {"command": "train", "advantage_estimator": "gspo", "other": 1}
    assert PolicyLossConfig.from_args(argparse.Namespace(**values, **run)) == replace(FULL, form="gspo")
    for wrong in (
        {"form": "ppo"},
        {"kl_loss_type": "k7"},
        {"eps_clip_c": 1.0},
        {"use_tis": True, "use_rollout_logprobs": True},
        {"kl_loss_coef": 0.1},
    ):
        with pytest.raises(ValueError):
            PolicyLossConfig(**wrong)


def test_errors_name_the_flag_that_was_given():
    for form, flag in (("ppo_clip", "--use-rollout-logprobs"), ("dppo_tv", "--advantage-estimator dppo_tv")):
        assert PolicyLossConfig(form=form, use_rollout_logprobs=True).reads_rollout_log_probs == (flag,)
    assert PolicyLossConfig(use_tis=True, use_rs=True).reads_rollout_log_probs == ("--use-tis", "--use-rs")


def test_a_pure_call_needs_what_the_config_needs():
    with pytest.raises(ValueError, match="ref_log_probs"):
        policy_loss(tensor([-1.0]), tensor([1.0]), tensor([1.0]), torch.tensor([1]), PolicyLossConfig(use_kl_loss=True))

"""Each formula against a slow transcription in plain Python, value and gradient, in float64."""

from __future__ import annotations

import argparse
import math
import random
import statistics

import pytest
import torch

from instep.algorithms.advantages.dr_grpo import dr_grpo
from instep.algorithms.advantages.grpo import grpo
from instep.algorithms.advantages.tokens import penalised_rewards
from instep.algorithms.advantages.whitening import masked_moments, mean_and_variance, whiten, whiten_with
from instep.algorithms.kl import KL_TYPES, approx_kl
from instep.algorithms.losses.policy import PolicyLossConfig, policy_loss
from instep.algorithms.losses.ppo_clip import ppo_clip_loss
from instep.algorithms.reductions import loss_weights
from instep.algorithms.segments import expand
from instep.errors import RolloutError
from instep.training.backend import TokenOutputs
from instep.training.losses import finish_metrics, policy_loss_fn, sft_loss_fn
from instep.types import TokenBatch
from tests.oracles.losses import scalar_kl, scalar_ppo

TOLERANCE = {"abs": 1e-9, "rel": 1e-6}
LENGTHS = [3, 1, 4, 2, 5, 2]
STEPS = [0, 0, 0, 1, 1, 1]
IDS = ["a", "a", None, "b", None, "c"]  # the first two are siblings


def numbers(n: int, seed: int, scale: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, scale) for _ in range(n)]


def tensor(values: list[float], grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def slope(function, values: list[float], i: int, h: float = 1e-6) -> float:
    up, down = list(values), list(values)
    up[i] += h
    down[i] -= h
    return (function(up) - function(down)) / (2 * h)


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


def test_whitening_ignores_masked_tokens_and_adds_up_over_ranks():
    values, mask = numbers(9, 2, 3.0), [1, 1, 0, 1, 0, 1, 1, 0, 1]
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean, variance = statistics.mean(kept), statistics.variance(kept)
    expected = [(v - mean) / math.sqrt(variance + 1e-8) for v in values]
    assert whiten(tensor(values), tensor(mask)).tolist() == pytest.approx(expected, **TOLERANCE)
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]  # the middle "rank" has no token with mask 1
    moments = [masked_moments(tensor(values)[p], tensor(mask)[p]) for p in parts]
    summed = mean_and_variance(*(torch.stack(column).sum() for column in zip(*moments, strict=True)))
    assert whiten_with(tensor(values), *summed).tolist() == pytest.approx(expected, **TOLERANCE)
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


MASK = [1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1]  # sample 3, an execution of its own, is masked out


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


# --- the whole loss -----------------------------------------------------------------------------------------------


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
    with pytest.raises(RolloutError, match="entropy"):
        policy_loss_fn(PolicyLossConfig(entropy_coef=0.1))(batch, TokenOutputs(tensor(current)))


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
    assert PolicyLossConfig.from_args(argparse.Namespace(**values, other=1)) == FULL
    for wrong in (
        {"kl_loss_type": "k7"},
        {"eps_clip_c": 1.0},
        {"use_tis": True, "use_rollout_logprobs": True},
        {"kl_loss_coef": 0.1},
    ):
        with pytest.raises(ValueError):
            PolicyLossConfig(**wrong)


def test_a_pure_call_needs_what_the_config_needs():
    with pytest.raises(ValueError, match="ref_log_probs"):
        policy_loss(tensor([-1.0]), tensor([1.0]), tensor([1.0]), torch.tensor([1]), PolicyLossConfig(use_kl_loss=True))

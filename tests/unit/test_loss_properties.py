"""What must not matter for a loss: order of samples, padding, micro-batches, copies of a fan-out; and bad input."""

from __future__ import annotations

import math
import random

import pytest
import torch

from instep.algorithms.losses.importance import importance_ratio, rejection_mask
from instep.algorithms.losses.policy import PolicyLossConfig
from instep.algorithms.reductions import loss_scales, loss_weights
from instep.errors import RolloutError
from instep.training.backend import LossOutput, TokenOutputs
from instep.training.losses import policy_loss_fn
from instep.types import TokenBatch

EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01}
CONFIGS = {
    "grpo": PolicyLossConfig(**EVERYTHING),
    "gspo": PolicyLossConfig(form="gspo", eps_clip=0.05, eps_clip_high=0.08, **EVERYTHING),
    "cispo": PolicyLossConfig(form="cispo", eps_clip=1, eps_clip_high=0.2, **EVERYTHING),
    "sapo": PolicyLossConfig(form="sapo", **EVERYTHING),
    "dppo tv": PolicyLossConfig(form="dppo_tv", use_rollout_logprobs=True, eps_clip=0.05, **EVERYTHING),
    "dppo kl": PolicyLossConfig(form="dppo_kl", use_rollout_logprobs=True, eps_clip=0.01, **EVERYTHING),
    "sequence weights": PolicyLossConfig(use_tis=True, tis_level="sequence", tis_mode="mask", tis_clip=1.5),
    "geometric weights": PolicyLossConfig(use_tis=True, tis_level="geometric", tis_clip_low=0.9, tis_clip=1.1),
    "rejection": PolicyLossConfig(use_rs=True, rs_level="geometric", rs_lower_bound=0.8, rs_veto_threshold=0.5),
    "gspo, sequence masking, icepop": PolicyLossConfig(
        form="gspo", use_opsm=True, opsm_delta=0.05, use_tis=True, tis_mode="mask", tis_clip_low=0.5
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
each_reduction = pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
LENGTHS = [4, 1, 6, 3, 5, 2]
IDS = ["a", "a", "b", "c", "d", "d"]
COLUMNS = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "current")


def samples(seed: int = 0) -> list[dict[str, list[float]]]:
    rng = random.Random(seed)
    out = []
    for n, execution in zip(LENGTHS, IDS, strict=True):
        current = [-abs(rng.gauss(0, 1)) - 0.1 for _ in range(n)]
        sample: dict = {"execution": execution, "current": current, "advantages": [rng.gauss(0, 1)] * n}
        for name in ("log_probs", "ref_log_probs", "rollout_log_probs"):
            sample[name] = [c + rng.gauss(0, 0.25) for c in current]
        sample["mask"] = [1] + [int(rng.random() < 0.7) for _ in range(n - 1)] if execution != "c" else [0] * n
        out.append(sample)
    return out


def run(
    rows: list[dict], config: PolicyLossConfig, per_token: bool, parts: list[list[int]] | None = None
) -> tuple[list[LossOutput], list[torch.Tensor]]:
    """The outputs of each micro-batch and the gradient of each sample's log-probs."""
    lengths = torch.tensor([len(r["mask"]) for r in rows])
    columns = {k: torch.tensor([x for r in rows for x in r[k]], dtype=torch.float64) for k in COLUMNS}
    mask = torch.tensor([x for r in rows for x in r["mask"]], dtype=torch.float64)
    where = lengths, [0] * len(rows), [r["execution"] for r in rows]
    columns["loss_weights"] = loss_weights(mask, *where, per_token=per_token)
    batch = TokenBatch(torch.zeros(int(lengths.sum()) + len(rows)).long(), lengths + 1, lengths, columns)
    x = [c.clone().requires_grad_() for c in columns["current"].split(lengths.tolist())]
    outputs = []
    for part in parts or [list(range(len(rows)))]:
        log_probs = torch.cat([x[i] for i in part])
        out = policy_loss_fn(config)(batch.select(part), TokenOutputs(log_probs, log_probs.detach().exp()))
        out.loss.backward()
        outputs.append(out)
    return outputs, [v.grad for v in x]


def total(outputs: list[LossOutput]) -> dict[str, float]:
    sums = {name: sum(o.sums[name].item() for o in outputs) for name in outputs[0].sums}
    return {**sums, "loss": sum(o.loss.item() for o in outputs)}


@each_reduction
@each_config
def test_order_and_micro_batches_do_not_matter(config: PolicyLossConfig, per_token: bool):
    rows = samples()
    whole, gradients = run(rows, config, per_token)
    assert max(float(g.abs().max()) for g in gradients) > 1e-2
    for parts in ([[5, 2], [0], [4, 1, 3]], [[i] for i in (3, 1, 5, 0, 2, 4)]):
        outputs, split = run(rows, config, per_token, parts)
        assert total(outputs) == pytest.approx(total(whole), rel=1e-12, abs=1e-14)
        for got, want in zip(split, gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    order = [4, 2, 0, 5, 3, 1]
    outputs, moved = run([rows[i] for i in order], config, per_token)
    assert total(outputs) == pytest.approx(total(whole), rel=1e-12, abs=1e-14)
    for place, i in enumerate(order):
        torch.testing.assert_close(moved[place], gradients[i], rtol=1e-12, atol=1e-15)


@each_reduction
@each_config
def test_padding_and_what_stands_under_the_mask_do_not_matter(config: PolicyLossConfig, per_token: bool):
    rows = samples()
    whole, gradients = run(rows, config, per_token)
    padded = [{**r, **{k: r[k] + [math.nan] * 3 for k in COLUMNS}, "mask": r["mask"] + [0] * 3} for r in rows]
    for r in padded:
        for k in COLUMNS:
            r[k] = [x if m else math.nan for x, m in zip(r[k], r["mask"], strict=True)]
    outputs, got = run(padded, config, per_token)
    assert total(outputs) == pytest.approx(total(whole), rel=1e-12, abs=1e-14)
    assert all(math.isfinite(v) for v in total(outputs).values())
    for g, want in zip(got, gradients, strict=True):
        torch.testing.assert_close(g[:-3], want, rtol=1e-12, atol=1e-15)
        assert g[-3:].abs().max() == 0


@each_config
def test_an_execution_counts_once_however_many_samples_it_made(config: PolicyLossConfig):
    """An execution split into equal samples instead of one: the others' gradients stay, and its own add up."""
    rows = samples()
    _, gradients = run(rows, config, False)
    copies = [*rows[:2], rows[2], {**rows[2]}, {**rows[2]}, *rows[3:]]
    _, got = run(copies, config, False)
    for place, i in enumerate([0, 1, 2, 2, 2, 3, 4, 5]):
        torch.testing.assert_close(got[place], gradients[i] / (3 if i == 2 else 1), rtol=1e-12, atol=1e-15)


@each_reduction
@each_config
def test_a_fully_masked_sample_gives_zero_and_counts_in_the_mean(config: PolicyLossConfig, per_token: bool):
    rows = samples()
    _, gradients = run(rows, config, per_token)
    assert gradients[3].abs().max() == 0  # execution c
    _, without = run(rows[:3] + rows[4:], config, per_token)
    share = 1.0 if per_token else 3 / 4  # of four executions three have tokens
    for got, want in zip(gradients[:3] + gradients[4:], without, strict=True):
        torch.testing.assert_close(got, share * want, rtol=1e-12, atol=1e-15)
    outputs, nothing = run([{**r, "mask": [0] * len(r["mask"])} for r in rows], config, per_token)
    assert all(g.abs().max() == 0 for g in nothing) and total(outputs)["loss"] == 0


@each_config
def test_an_empty_response_has_no_part(config: PolicyLossConfig):
    rows = samples()
    whole, gradients = run(rows, config, True)
    empty = {name: [] for name in (*COLUMNS, "mask")} | {"execution": "e"}
    outputs, got = run([empty, *rows[:3], empty, *rows[3:]], config, True)
    assert total(outputs) == pytest.approx(total(whole), rel=1e-12, abs=1e-14)
    for place, i in ((1, 0), (2, 1), (3, 2), (5, 3), (6, 4), (7, 5)):
        torch.testing.assert_close(got[place], gradients[i], rtol=1e-12, atol=1e-15)


def test_far_away_policies_stay_finite_in_float32():
    far = torch.tensor([-90.0, -0.1, -0.1], requires_grad=True)
    columns = {
        "loss_weights": torch.ones(3) / 3,
        "advantages": torch.tensor([1.0, -1.0, 1.0]),
        "log_probs": torch.tensor([-0.1, -95.0, -0.1]),
        "ref_log_probs": torch.tensor([-0.1, -95.0, -90.0]),
        "rollout_log_probs": torch.tensor([-99.0, -0.1, -0.1]),
    }
    batch = TokenBatch(torch.zeros(5).long(), torch.tensor([3, 2]), torch.tensor([2, 1]), columns)
    for config in CONFIGS.values():
        far.grad = None
        out = policy_loss_fn(config)(batch, TokenOutputs(far, far.detach().exp()))
        out.loss.backward()
        assert out.loss.isfinite() and far.grad.isfinite().all(), config


@pytest.mark.parametrize(
    "config",
    [PolicyLossConfig(use_tis=True), PolicyLossConfig(use_rs=True), PolicyLossConfig(use_rollout_logprobs=True)],
)
def test_samples_without_engine_log_probs_are_named_where_the_loss_needs_them(config: PolicyLossConfig):
    rows = samples()
    rows[4]["rollout_log_probs"] = [math.nan] * 5
    with pytest.raises(RolloutError, match="no engine log-probs") as error:
        run(rows, config, False)
    assert "first sample 4" in error.value.where and error.value.remedy


def test_corrections_read_the_mask_and_have_no_gradient():
    train = torch.tensor([-1.0, -9.0, -1.0, -1.5], requires_grad=True)
    engine = torch.tensor([-1.2, -1.0, -1.0, -1.0])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for level, expected in (
        ("sequence", [math.exp(0.2)] * 2 + [math.exp(-0.5)] * 2),
        ("geometric", [math.exp(0.2)] * 2 + [math.exp(-0.25)] * 2),
    ):
        ratio = importance_ratio(train, engine, mask, [2, 2], level)
        assert ratio.tolist() == pytest.approx(expected) and not ratio.requires_grad
    keep = rejection_mask(train, engine, mask, [2, 2], low=0.0, veto_threshold=1e-3)
    assert keep.tolist() == [1.0, 1.0, 1.0, 1.0]  # the far token is masked
    keep = rejection_mask(train, engine, mask, [2, 2], low=0.0, veto_threshold=0.7)
    assert keep.tolist() == [1.0, 1.0, 0.0, 0.0] and not keep.requires_grad


def test_contradictions_and_unknown_names_are_refused():
    for wrong in (
        {"use_rs": True, "use_rollout_logprobs": True},
        {"form": "dppo_tv"},
        {"form": "dppo_kl"},
        {"tis_level": "word"},
        {"tis_mode": "drop"},
        {"rs_level": "word"},
    ):
        with pytest.raises(ValueError):
            PolicyLossConfig(**wrong)


def test_what_a_users_reduction_is_scaled_by():
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1])
    where = mask, [2, 1, 3, 0], [0, 0, 1, -1], ["a", "a", "b", "c"]
    assert loss_scales(*where).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert loss_scales(*where, per_token=True).tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 3, 0.0])
    with pytest.raises(ValueError, match="do not fit together"):
        loss_scales(mask, [2, 1], [0, 0])

"""Users' corrections, reducers and losses, under slime's signatures, against what instep does itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from instep.algorithms.losses.policy import PolicyLossConfig
from instep.algorithms.reductions import loss_scales, loss_weights
from instep.errors import RolloutError
from instep.training.backend import LossOutput, TokenOutputs
from instep.training.log_probs import log_probs_and_entropy
from instep.training.loss_hooks import LossHooks, custom_loss_fn
from instep.training.losses import policy_loss_fn
from instep.training.packing import response_positions, response_targets, response_temperatures
from instep.types import TokenBatch

LENGTHS = [3, 1, 4, 2]
VOCAB = 11
ARGS = SimpleNamespace(
    calculate_per_token_loss=False,
    tis_clip=1.4,
    tis_clip_low=0.6,
    tis_upper_bound=1.4,
    tis_lower_bound=0.6,
    eps_clip=0.2,
    eps_clip_high=0.3,
    entropy_coef=0.05,
    rollout_temperature=0.8,
    custom_loss_function_path="tests.loss_hooks.ppo_loss",
)
ARGS.view = lambda runtime: ARGS


def make_batch(per_token: bool = False) -> tuple[TokenBatch, torch.Tensor]:
    """Four samples of three executions, and logits of all their tokens."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    total = lengths + torch.tensor([2, 1, 3, 2])
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 1.0], dtype=torch.float64)
    where = mask, LENGTHS, [0] * 4, ["a", "b", "b", "c"]
    columns = {"loss_mask": mask, "loss_weights": loss_weights(*where, per_token=per_token)}
    for name in ("advantages", "log_probs", "rollout_log_probs"):
        columns[name] = torch.randn(10, generator=g, dtype=torch.float64) * (1 if name == "advantages" else 0.3) - 2.4
    columns["advantages"] += 2.4
    tokens = torch.randint(0, VOCAB, (int(total.sum()),), generator=g)
    samples = {"loss_scale": loss_scales(*where, per_token=per_token), "temperature": torch.full((4,), 0.8)}
    batch = TokenBatch(tokens, total, lengths, columns, samples)
    return batch, torch.randn(1, len(tokens), VOCAB, generator=g, dtype=torch.float64)


def outputs_of(batch: TokenBatch, logits: torch.Tensor) -> TokenOutputs:
    temperature = response_temperatures(batch)
    scores = logits[0][response_positions(batch)]
    out = log_probs_and_entropy(scores, response_targets(batch), temperature, vocab_size=VOCAB, with_entropy=True)
    return TokenOutputs(*out, logits)


def run(
    loss_fn, per_token: bool = False, parts: list[list[int]] | None = None
) -> tuple[list[LossOutput], torch.Tensor]:
    """Outputs of the micro-batches and the gradient of the logits."""
    batch, logits = make_batch(per_token)
    logits.requires_grad_()
    pieces = logits[0].split(batch.total_lengths.tolist())
    outs = []
    for part in parts or [[0, 1, 2, 3]]:
        micro = batch.select(part)
        outs.append(loss_fn(micro, outputs_of(micro, torch.cat([pieces[i] for i in part])[None])))
    sum(o.loss for o in outs).backward()
    return outs, logits.grad


def test_a_correction_per_token_is_the_built_in_one():
    own = policy_loss_fn(PolicyLossConfig(use_tis=True, tis_mode="mask", tis_clip=1.4, tis_clip_low=0.6))
    hooked = policy_loss_fn(PolicyLossConfig(use_tis=True), LossHooks(ARGS, tis="tests.loss_hooks.icepop"))
    (expected,), gradient = run(own)
    (got,), hook_gradient = run(hooked)
    assert torch.equal(hook_gradient, gradient) and gradient.abs().max() > 0.01
    assert got.sums["tis"] == expected.sums["tis"]
    kept = 1 - expected.sums["tis_clipfrac"].item()
    assert 0 < kept < 1 and got.sums["kept"].item() == pytest.approx(kept)


def test_a_correction_by_masks_is_rejection_and_weights_of_whole_samples():
    values = {"tis_level": "sequence", "tis_clip": 1.4, "tis_clip_low": 0.6, "rs_level": "sequence"}
    own = policy_loss_fn(PolicyLossConfig(use_tis=True, use_rs=True, tis_mode="clip", **values))
    hooks = LossHooks(ARGS, tis="tests.loss_hooks.sequence_rejection")
    for parts in (None, [[2, 0], [3], [1]]):
        expected, gradient = run(own)
        got, hook_gradient = run(policy_loss_fn(PolicyLossConfig(use_tis=True), hooks), parts=parts)
        torch.testing.assert_close(hook_gradient, gradient, rtol=1e-12, atol=1e-15)
        assert 0 < expected[0].sums["rs_clipfrac"].item() < 1
        total = sum(o.sums["mis_weight"].item() for o in got)
        assert total == pytest.approx(expected[0].sums["tis"].item())


@pytest.mark.parametrize("per_token", [False, True])
def test_a_reducer_takes_the_place_of_the_mean_and_its_sum_is_divided_as_in_slime(per_token: bool):
    hooks = LossHooks(ARGS, reducer="tests.loss_hooks.dr_grpo_reducer")
    ARGS.calculate_per_token_loss = per_token
    try:
        outs, gradient = run(policy_loss_fn(PolicyLossConfig(), hooks), per_token, [[1, 3], [0, 2]])
    finally:
        ARGS.calculate_per_token_loss = False
    batch, logits = make_batch(per_token)
    lp = outputs_of(batch, logits.requires_grad_()).log_probs
    old, a = batch.token_columns["log_probs"], batch.token_columns["advantages"]
    ratio = (lp - old).exp()
    token_loss = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
    expected = (token_loss * batch.token_columns["loss_mask"]).sum() / 10 / (8 if per_token else 3)
    expected.backward()
    assert sum(o.loss for o in outs).item() == pytest.approx(expected.item(), rel=1e-6)  # the scale is a float32
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-6, atol=1e-12)


def test_metrics_of_a_correction_are_means_over_trained_tokens():
    hooks = LossHooks(ARGS, tis="tests.loss_hooks.nan_under_the_mask")
    outs, _ = run(policy_loss_fn(PolicyLossConfig(use_tis=True), hooks), parts=[[0, 3], [1, 2]])
    assert sum(o.sums["one"].item() for o in outs) == pytest.approx(1.0)


def test_a_reducer_sees_the_masks_that_the_correction_has_left():
    hooks = LossHooks(ARGS, "tests.loss_hooks.sequence_rejection", "tests.loss_hooks.kept_tokens_reducer")
    (out,), _ = run(policy_loss_fn(PolicyLossConfig(use_tis=True), hooks))
    batch, logits = make_batch()
    columns = batch.token_columns
    ratio = (outputs_of(batch, logits).log_probs - columns["log_probs"]).exp()
    a = columns["advantages"]
    token_loss = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
    parts = zip(
        *(c.split(LENGTHS) for c in (columns["log_probs"], columns["rollout_log_probs"], columns["loss_mask"])),
        strict=True,
    )
    total, kept, place = 0.0, 0.0, 0
    for train, engine, mask in parts:
        k = ((train - engine) * mask).sum().exp().item()
        if 0.6 <= k <= 1.4:
            kept += mask.sum().item()
            total += k * (token_loss[place : place + len(mask)] * mask).sum().item()
        place += len(mask)
    assert 0 < kept < columns["loss_mask"].sum()
    assert out.loss.item() == pytest.approx(total / kept / 3, rel=1e-6)  # of three executions


@pytest.mark.parametrize("per_token", [False, True])
def test_a_custom_loss_over_logits_is_the_policy_loss_that_it_writes_down(per_token: bool):
    own = policy_loss_fn(PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.3, entropy_coef=0.05))
    (expected,), gradient = run(own, per_token)
    for parts in (None, [[3, 1], [0], [2]]):
        outs, hook_gradient = run(custom_loss_fn(ARGS), per_token, parts)
        torch.testing.assert_close(hook_gradient, gradient, rtol=1e-6, atol=1e-12)
        for name in ("loss", "pg_loss", "entropy", "log_prob", "loss_weight"):
            assert sum(o.sums[name].item() for o in outs) == pytest.approx(expected.sums[name].item(), rel=1e-5), name
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "what", "where"),
    [
        ("raises", "raised KeyError('oops')", "loss_hooks.py:"),
        ("forgets_the_masks", "returned", "forgets_the_masks"),
        ("metrics_of_another_shape", "'mean': ()}", "metrics_of_another_shape"),
        ("takes_an_own_name", "returned", "takes_an_own_name"),
    ],
)
def test_a_hook_that_fails_is_named(name: str, what: str, where: str):
    hooks = LossHooks(ARGS, tis=f"tests.loss_hooks.{name}")
    with pytest.raises(RolloutError) as error:
        run(policy_loss_fn(PolicyLossConfig(use_tis=True), hooks))
    assert what in error.value.what and where in error.value.where and error.value.remedy
    bad = SimpleNamespace(**{**vars(ARGS), "custom_loss_function_path": "tests.loss_hooks.dr_grpo_reducer"})
    bad.view = lambda runtime: bad
    with pytest.raises(RolloutError, match="dr_grpo_reducer"):
        run(custom_loss_fn(bad))

"""Our losses and corrections against the functions of TRL 1.16.0 and verl 0.9.1, value and gradient, in float64.

Run by `make test-peers`. Every response is an execution of its own (the peers know no fan-out) of one optimizer step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from instep.algorithms.kl import approx_kl
from instep.algorithms.losses.importance import (
    bounded_weights,
    importance_ratio,
    off_policy_sequence_mask,
    rejection_mask,
)
from instep.algorithms.losses.offline import dpo_loss
from instep.algorithms.losses.policy import PolicyLossConfig
from instep.training.backend import TokenOutputs
from instep.training.losses import policy_loss_fn
from tests.oracles import peers
from tests.oracles.losses import Response, responses
from tests.oracles.test_oracle_losses import column, token_batch

pytestmark = pytest.mark.peers
CLOSE = {"rtol": 1e-6, "atol": 1e-9}
each_seed = pytest.mark.parametrize("seed", range(5))


def data(seed: int, *, masked: bool = False) -> list[Response]:
    """Nine responses; `masked` keeps the one that is masked out as a whole."""
    batch = [dataclasses.replace(r, step=0, execution=str(i)) for i, r in enumerate(responses(seed))]
    return batch if masked else [r for r in batch if r.kept]


def ours(
    batch: list[Response], config: PolicyLossConfig, per_token: bool, constant: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = column([r.current for r in batch]).requires_grad_()
    loss = policy_loss_fn(config)(token_batch(batch, per_token, constant), TokenOutputs(x)).loss
    loss.backward()
    return loss.detach(), x.grad


def agreed_gradient(
    batch: list[Response], config: PolicyLossConfig, per_token: bool, peer: Any, constant: int | None = None
) -> float:
    """The largest entry of the gradient, when it and the loss agree; `peer` maps padded log-probs to its loss."""
    loss, gradient = ours(batch, config, per_token, constant)
    x = peers.padded(batch, "current").requires_grad_()
    theirs = peer(x)
    theirs.backward()
    torch.testing.assert_close(loss, theirs.detach().reshape(()).double(), **CLOSE)
    torch.testing.assert_close(gradient, peers.flat(x.grad, batch), **CLOSE)
    return gradient.abs().max().item()


# --- verl -----------------------------------------------------------------------------------------------------------


def verl_loss(
    batch: list[Response],
    mode: str,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    aggregation: str = "",
    old: str = "old",
    **config: Any,
):
    function = peers.core_algos().get_policy_loss_fn(mode)
    settings = peers.verl_config(**config)
    aggregation = aggregation or ("token-mean" if per_token else "seq-mean-token-mean")

    def peer(x: torch.Tensor) -> torch.Tensor:
        before, mask, adv = (peers.padded(batch, name) for name in (old, "mask", "advantage"))
        return function(before, x, adv, mask, aggregation, settings, weights)[0]

    return peer


VERL = {
    "vanilla": (
        PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=1.3),
        {"mode": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.3},
    ),
    "gspo": (
        PolicyLossConfig(form="gspo", eps_clip=0.05, eps_clip_high=0.1),
        {"mode": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    ),
    "cispo": (
        PolicyLossConfig(form="cispo", eps_clip=0.2, eps_clip_high=0.3),
        {"mode": "cispo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    ),
    "sapo": (
        PolicyLossConfig(form="sapo", sapo_tau_pos=1.0, sapo_tau_neg=1.5),
        {"mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.5},
    ),
    "dppo_tv": (
        PolicyLossConfig(form="dppo_tv", use_rollout_logprobs=True, eps_clip=0.03, eps_clip_high=0.05, eps_clip_c=1.2),
        {"mode": "dppo_tv", "clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2, "old": "engine"},
    ),
    "dppo_kl": (
        PolicyLossConfig(form="dppo_kl", use_rollout_logprobs=True, eps_clip=0.002, eps_clip_high=0.01),
        {"mode": "dppo_kl", "clip_ratio_low": 0.002, "clip_ratio_high": 0.01, "clip_ratio_c": 1e9, "old": "engine"},
    ),
}


@each_seed
@pytest.mark.parametrize(
    ("form", "per_token"),
    [(form, per_token) for form in VERL for per_token in (False, True) if (form, per_token) != ("sapo", True)],
)  # verl's SAPO has the per-sample reduction only
def test_oracle_verl_policy_losses(form: str, per_token: bool, seed: int):
    batch, (config, settings) = data(seed), VERL[form]
    assert agreed_gradient(batch, config, per_token, verl_loss(batch, per_token=per_token, **settings)) > 1e-3


@each_seed
@pytest.mark.parametrize(("level", "mode", "bounds"), [
    ("token", "truncate", (0.0, 1.1)),
    ("sequence", "truncate", (0.0, 1.3)),
    ("token", "mask", (0.8, 1.25)),
    ("sequence", "mask", (0.5, 1.7)),
])  # fmt: skip
def test_oracle_verl_importance_weights(level: str, mode: str, bounds: tuple[float, float], seed: int):
    batch = data(seed, masked=True)
    helper = peers.load("verl.trainer.ppo.rollout_corr_helper")
    mask = peers.padded(batch, "mask")
    threshold = bounds[1] if mode == "truncate" else f"{bounds[0]}_{bounds[1]}"
    log_ratio = peers.padded(batch, "old") - peers.padded(batch, "engine")
    theirs, _ = helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
    lengths = [len(r.mask) for r in batch]
    flat_mask = column([r.mask for r in batch])
    ratio = importance_ratio(
        column([r.old for r in batch]), column([r.engine for r in batch]), flat_mask, lengths, level
    )
    got = bounded_weights(ratio, mode, low=bounds[0], high=bounds[1])
    torch.testing.assert_close(got.weights * flat_mask, peers.flat(theirs, batch), **CLOSE)
    # and in the loss, beside another form than PPO's
    batch = data(seed)
    log_ratio = peers.padded(batch, "old") - peers.padded(batch, "engine")
    theirs, _ = helper.compute_rollout_correction_weights(log_ratio, peers.padded(batch, "mask"), level, threshold)
    config, settings = VERL["gspo"]
    values = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_clip_low": bounds[0], "tis_clip": bounds[1]}
    config = PolicyLossConfig(**{**vars(config), **values})
    assert agreed_gradient(batch, config, False, verl_loss(batch, per_token=False, weights=theirs, **settings)) > 1e-3


@each_seed
@pytest.mark.parametrize(("level", "option"), [
    ("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1"),
])  # fmt: skip
def test_oracle_verl_rejection(level: str, option: str, seed: int):
    batch = data(seed)
    helper = peers.load("verl.trainer.ppo.rollout_corr_helper")
    mask = peers.padded(batch, "mask")
    log_ratio = peers.padded(batch, "old") - peers.padded(batch, "engine")
    low, high = {"token": (0.7, 1.3), "sequence": (0.5, 1.6), "geometric": (0.85, 1.2)}[level]
    bounds = f"{1 / high}_{1 / low}"  # verl's are of engine / trainer here, unlike those of its weights
    theirs, _ = helper.compute_rollout_rejection_mask(log_ratio, mask, option, bounds)
    flat_mask = column([r.mask for r in batch])
    keep = rejection_mask(
        column([r.old for r in batch]), column([r.engine for r in batch]), flat_mask, [len(r.mask) for r in batch],
        level=level, low=low, high=high,
    )  # fmt: skip
    assert torch.equal(keep * flat_mask, peers.flat(theirs, batch).double())


@each_seed
@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_oracle_verl_kl(kind: str, seed: int):
    batch = data(seed)
    x, y = (column([r.current for r in batch]).requires_grad_() for _ in range(2))
    ref = column([r.ref for r in batch])
    ours, theirs = approx_kl(x, ref, kind), peers.core_algos().kl_penalty(y, ref, kind)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **CLOSE)


# --- TRL ------------------------------------------------------------------------------------------------------------


def trl_loss(batch: list[Response], more: dict[str, torch.Tensor] | None = None, **settings: Any):
    columns = {"completion_mask": peers.padded(batch, "mask"), "advantages": peers.padded(batch, "advantage")[:, 0]}
    columns |= {"old_per_token_logps": peers.padded(batch, "old"), "ref_per_token_logps": peers.padded(batch, "ref")}
    columns |= more or {}
    return lambda x: peers.trl_grpo_loss(x, columns, **settings)


KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True}
TRL = {
    "grpo": (
        PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.28),
        False,
        {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0},
    ),
    "dapo": (
        PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.28),
        True,
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0},
    ),
    "grpo with KL": (
        PolicyLossConfig(eps_clip=0.2, **KL),
        False,
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "gspo": (
        PolicyLossConfig(form="gspo", eps_clip=0.05, eps_clip_high=0.1),
        False,
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.1,
            "beta": 0.0,
        },
    ),
    "cispo": (
        PolicyLossConfig(form="cispo", eps_clip=1.0, eps_clip_high=0.3),
        True,
        {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.0},
    ),
    "sapo": (
        PolicyLossConfig(form="sapo"),
        False,
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "beta": 0.0},
    ),
    "dual clip": (
        PolicyLossConfig(eps_clip=0.2, eps_clip_c=1.4),
        False,
        {"loss_type": "grpo", "epsilon": 0.2, "delta": 1.4, "beta": 0.0},
    ),
    "off-policy sequence masking": (
        PolicyLossConfig(eps_clip=0.2, use_opsm=True, opsm_delta=0.03),
        False,
        {"loss_type": "grpo", "epsilon": 0.2, "off_policy_mask_threshold": 0.03, "beta": 0.0},
    ),
}


@each_seed
@pytest.mark.parametrize("form", TRL)
def test_oracle_trl_policy_losses(form: str, seed: int):
    batch, (config, per_token, settings) = data(seed), TRL[form]
    assert agreed_gradient(batch, config, per_token, trl_loss(batch, **settings)) > 1e-3


@each_seed
@pytest.mark.parametrize(("gradient", "peer"), [("token", "verl"), ("sequence", "TRL")])
def test_oracle_gspo_with_weights_of_tokens_has_both_gradients(gradient: str, peer: str, seed: int):
    batch = data(seed)
    bounds = {"eps_clip": 0.05, "eps_clip_high": 0.1, "gspo_gradient": gradient}
    config = PolicyLossConfig(form="gspo", use_tis=True, tis_mode="clip", tis_clip_low=0.8, tis_clip=1.2, **bounds)
    weights = (peers.padded(batch, "old") - peers.padded(batch, "engine")).exp().clamp(0.8, 1.2)
    if peer == "verl":
        theirs = verl_loss(batch, weights=weights, mode="gspo", clip_ratio_low=0.05, clip_ratio_high=0.1)
    else:
        settings = {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.0}
        settings |= {"importance_sampling_level": "sequence"}
        theirs = trl_loss(batch, {"importance_sampling_ratio": weights}, **settings)
    assert agreed_gradient(batch, config, False, theirs) > 1e-3
    other = dataclasses.replace(config, gspo_gradient="sequence" if gradient == "token" else "token")
    assert not torch.allclose(ours(batch, other, False)[1], ours(batch, config, False)[1], rtol=1e-3)


@each_seed
def test_oracle_dr_grpo_of_trl_and_verl_has_a_constant_length(seed: int):
    """Both harnesses take the longest response of the batch for the constant."""
    batch = data(seed, masked=True)
    longest, config = max(len(r.mask) for r in batch), PolicyLossConfig(eps_clip=0.2)
    assert (
        agreed_gradient(batch, config, False, trl_loss(batch, loss_type="dr_grpo", epsilon=0.2, beta=0.0), longest)
        > 1e-3
    )
    batch = data(seed)  # verl does not count what is fully masked
    longest = max(len(r.mask) for r in batch)
    settings = {"mode": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}
    assert (
        agreed_gradient(
            batch, config, False, verl_loss(batch, aggregation="seq-mean-token-sum-norm", **settings), longest
        )
        > 1e-3
    )


@each_seed
def test_oracle_trl_counts_a_fully_masked_response_in_the_mean_as_we_do(seed: int):
    batch = data(seed, masked=True)
    assert (
        agreed_gradient(
            batch, PolicyLossConfig(eps_clip=0.2), False, trl_loss(batch, loss_type="grpo", epsilon=0.2, beta=0.0)
        )
        > 1e-3
    )


@each_seed
def test_oracle_trl_sequence_mask(seed: int):
    batch = data(seed)
    trainer = peers.load("trl.trainer.grpo_trainer").GRPOTrainer
    columns = [peers.padded(batch, name) for name in ("advantage", "current", "old", "mask")]
    theirs = trainer.get_off_policy_mask(columns[0][:, :1], *columns[1:], 0.03)
    flat_mask = column([r.mask for r in batch])
    got = off_policy_sequence_mask(
        column([r.current for r in batch]), column([r.old for r in batch]),
        column([[r.advantage] * len(r.mask) for r in batch]), flat_mask, [len(r.mask) for r in batch], delta=0.03,
    )  # fmt: skip
    assert torch.equal(got, peers.flat(theirs, batch))
    assert got.mean() < 1 or seed == 4


@each_seed
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_oracle_trl_dpo(beta: float, seed: int):
    g = torch.Generator().manual_seed(seed)
    rows = [(-8 * torch.rand(12, generator=g, dtype=torch.float64)) for _ in range(4)]
    one, other = ([r.clone().requires_grad_() for r in rows[:2]] for _ in range(2))
    loss = dpo_loss(*one, *rows[2:], beta=beta).loss.mean()
    theirs = peers.trl_dpo_loss(*other, *rows[2:], beta=beta)
    torch.testing.assert_close(loss, theirs, **CLOSE)
    loss.backward()
    theirs.backward()
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)

"""The forms of the policy loss: functions of flat token columns, by the importance ratio of a token or a sequence.

Columns are `[num_tokens]`. The gradient flows through `log_probs` only; where they are a factor (CISPO, DPPO), through
that factor only. An unknown divergence, and a mask or lengths that do not fit, raise ValueError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from instep.algorithms.segments import Lengths, expand, segment_mean

MAX_LOG_RATIO = 20.0  # the ratio is constant (4.9e8) beyond it, so no float32 overflow makes a gradient NaN
GRADIENTS = ("token", "sequence")  # of GSPO
DIVERGENCES = ("tv", "kl")
_LEAST = 1e-8  # of the probability of all other tokens: in float32 the probability of a certain token is 1


class PolicyLoss(NamedTuple):
    """All `[num_tokens]`: the loss to reduce, and detached numbers to report."""

    loss: Tensor
    clipped: Tensor  # 1.0 if clipping changed the loss (CISPO: the weight)
    ppo_kl: Tensor  # k1 of old against current: old_log_probs - log_probs


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio), finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> PolicyLoss:
    """Compute max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(log_ratio); see `ppo_clip_loss`."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = exp_ratio(log_ratio)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (bounded > plain).to(loss.dtype), -log_ratio.detach())


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """Compute max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(log_probs - old_log_probs).

    PPO (arXiv:1707.06347, eq. 7); a higher upper bound is DAPO's clip-higher (arXiv:2503.14476); `eps_clip_c` > 1 is
    the dual clip (arXiv:1912.09729): for A < 0 the loss is at most -eps_clip_c A.
    """
    return clipped_surrogate(
        log_probs - old_log_probs.detach(),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_lengths: Lengths,
    *,
    eps_clip: float = 3e-4,
    eps_clip_high: float | None = 4e-4,
    eps_clip_c: float | None = None,
    gradient: str = "token",
) -> PolicyLoss:
    """Compute max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A) with the ratio of the sample instead of the
    token's.

    s_i = exp(sum_t m_t (log_probs_t - old_log_probs_t) / sum_t m_t). Source: Zheng et al., arXiv:2507.18071, eq. 5;
    Gradient "token" is its GSPO-token form, s_i,t = sg[s_i] exp(log_probs_t - sg[log_probs_t]): the same value, and the
    same gradient if a sample's tokens have one advantage and one weight; tokens may differ in both. With "sequence" the
    gradient flows through s_i itself, so every token of a sample gets the mean of their weights.

    The per-sample reduction is the paper's objective: the mean over responses of min(s A, clip(s) A). With
    `--calculate-per-token-loss` a response counts in proportion to its tokens. The gradient is then that of sum_i |y_i|
    min(s_i A_i, clip(s_i) A_i) / sum_i |y_i|.

    Args:
        mask: `[num_tokens]`, above 0 for the tokens that count in the ratio.
        response_lengths: of each sample, all of whose tokens are here.
        gradient: one of `GRADIENTS`.
    """
    log_ratio = expand(segment_mean(log_probs - old_log_probs, mask, response_lengths), response_lengths)
    if gradient == "token":
        log_ratio = log_ratio.detach() + (log_probs - log_probs.detach())
    return clipped_surrogate(
        log_ratio, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 1.0,
    eps_clip_high: float | None = 4.0,
) -> PolicyLoss:
    """Compute -sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] A log_probs, r = exp(log_probs - old_log_probs).

    Source: MiniMax-M1, arXiv:2506.13585, eqs. 4-5, which sets no lower bound (`eps_clip` 1) and does not publish the
    upper one. The maximum weight of 5 is from arXiv:2510.13786.
    """
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = exp_ratio(log_ratio)
    weight = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return PolicyLoss(-weight * advantages * log_probs, (weight != ratio).to(ratio.dtype), -log_ratio)


def sapo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> PolicyLoss:
    """Compute -f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), tau = `tau_pos` for A > 0, otherwise `tau_neg`.

    r = exp(log_probs - old_log_probs). df/dr = 4 p (1 - p), p = sigmoid(tau (r - 1)): it is 1 at r = 1, as in the
    unclipped objective, and falls on both sides, faster for greater tau. Source: Gao et al., arXiv:2511.20347.
    """
    log_ratio = log_probs - old_log_probs.detach()
    ratio = exp_ratio(log_ratio)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    return PolicyLoss(loss, torch.zeros_like(ratio).detach(), -log_ratio.detach())


def dppo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence: str,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """Compute -sg[M min(r, eps_clip_c)] A log_probs, r = exp(log_probs - rollout_log_probs).

    M is 0 if the update would move further away from the sampling policy (A > 0 and r > 1, or A < 0 and r < 1) and
    `binary_divergence` is above its threshold: `eps_clip_high` for A > 0, `eps_clip` for A < 0. Without `eps_clip_c`, r
    has no bound, and the gradient is that of -M r A. Source: Qi et al., arXiv:2602.04879, eqs. 12 and 23; the paper has
    one threshold for both signs.

    Args:
        rollout_log_probs: the engine's, not recomputed ones (section 5.2).
    """
    log_ratio = (log_probs - rollout_log_probs).detach()
    moved = binary_divergence(log_probs.detach(), rollout_log_probs, divergence)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    away = advantages * log_ratio > 0
    masked = away & torch.where(advantages > 0, moved > high, moved > eps_clip)
    ratio = exp_ratio(log_ratio)
    weight = (ratio if eps_clip_c is None else ratio.clamp(max=eps_clip_c)).masked_fill(masked, 0.0)
    return PolicyLoss(-weight * advantages * log_probs, masked.to(ratio.dtype), -log_ratio)


def binary_divergence(log_probs: Tensor, rollout_log_probs: Tensor, kind: str) -> Tensor:
    """Compute the divergence between a token's probability p now and q at sampling, with all other tokens as one.

    tv: |p - q|. kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)), in nats. Source: arXiv:2602.04879, eqs. 13 and 14.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"unknown divergence {kind!r}; known are {', '.join(DIVERGENCES)}")
    sampled = rollout_log_probs.exp()
    if kind == "tv":
        return (log_probs.exp() - sampled).abs()
    others, others_sampled = ((-x.expm1()).clamp(min=_LEAST) for x in (log_probs, rollout_log_probs))
    return sampled * (rollout_log_probs - log_probs) + others_sampled * (others_sampled / others).log()

"""Penalties in the reward of a response, and the estimators with an advantage for each token: REINFORCE++ and GAE.

Rewards are `[num_samples]`. Columns of tokens are `[num_response_tokens]`: `loss_mask`, 0 or 1 (a sample may be fully
masked), and `kl`, of any estimator of `algorithms.kl`, old policy against reference. A `kl_coef` without it raises
ValueError. Advantages are float64, without gradient, and 0 where the mask is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.algorithms.segments import Lengths, expand, segment_sum

WHITEN_EPS = 1e-8


def penalised_rewards(
    rewards: Tensor, kl: Tensor, loss_mask: Tensor, response_lengths: Lengths, kl_coef: float
) -> Tensor:
    """Compute rewards with a KL penalty, for estimators with one advantage per response: r_i - kl_coef * sum_t m_t
    kl_t.

    The penalty is applied before the comparison within the group, as in verl: its `apply_kl_penalty` subtracts it from
    token rewards, and its outcome advantages start with their sum over a response. Tool tokens (mask 0) cost nothing.
    """
    penalty = segment_sum(kl.double(), loss_mask, response_lengths)
    return (rewards.double() - kl_coef * penalty).to(rewards.dtype)


def overlong_penalty(
    response_lengths: Lengths, *, max_response_len: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Compute factor * clip((max_response_len - buffer_len - |y|) / buffer_len, -1, 0) (arXiv:2503.14476, eq. 13).

    It is 0 up to the buffer, then falls linearly, and is -factor at the limit and beyond. Add it to the rewards.

    Args:
        response_lengths: `[num_samples]`, in tokens, with tool tokens, which also count for the limit.

    Returns:
        float64 `[num_samples]`.
    """
    lengths = torch.as_tensor(response_lengths).double()
    return factor * ((max_response_len - buffer_len - lengths) / buffer_len).clamp(-1, 0)


def trained_rewards(
    rewards: Tensor, loss_mask: Tensor, response_lengths: Sequence[int], kl: Tensor | None, kl_coef: float
) -> tuple[Tensor, list[int], Tensor]:
    """Compute the reward of each trained token (mask 1): -kl_coef kl_t; the last one also gets the sample's reward.

    The reward of a response without a trained token is ignored.

    Returns:
        The rewards, float64 `[num_trained_tokens]`, samples one after another; the trained tokens of each sample; and
        int64, the place of the last one of each sample that has any.
    """
    keep = loss_mask > 0
    lengths = [int(part.sum()) for part in keep.split(list(response_lengths))]
    values = torch.zeros(sum(lengths), dtype=torch.float64, device=rewards.device)
    if kl_coef:
        if kl is None:
            raise ValueError("kl_coef needs the KL to the reference")
        values -= kl_coef * kl.detach()[keep].double()
    counts = torch.tensor(lengths, device=rewards.device)
    last = counts[counts > 0].cumsum(0) - 1
    values[last] += rewards.detach().double()[counts > 0]
    return values, lengths, last


def discounted_sums(values: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """Compute G_t = v_t + factor * G_{t+1} within each sequence, G = 0 after its end.

    All sequences are summed at once from their ends, without padding. The number of passes is the length of the
    longest.

    Args:
        values: `[sum(lengths)]`, sequences one after another; a length may be 0.
    """
    out = values.clone()
    sizes, order = torch.as_tensor(lengths, dtype=torch.int64).sort(descending=True)
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)[order].to(values.device)
    at_least = sizes.tolist()
    for from_end in range(2, max(lengths, default=0) + 1):
        while at_least[-1] < from_end:
            at_least.pop()
        rows = ends[: len(at_least)] - from_end
        out[rows] += factor * out[rows + 1]
    return out


def reinforce_plus_plus(
    rewards: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Tensor:
    """Compute G_t = sum_{s >= t} gamma^(s - t) (1[s = last] r - kl_coef kl_s), not whitened yet (arXiv:2501.03262).

    Sums and steps are over the trained tokens of a response: tool tokens (mask 0) are not actions: they cost no KL and
    do not discount. The last trained token gets the reward. The caller whitens the advantages.
    """
    given, lengths, _ = trained_rewards(rewards, loss_mask, response_lengths, kl, kl_coef)
    out = torch.zeros(loss_mask.numel(), dtype=torch.float64, device=rewards.device)
    out[loss_mask > 0] = discounted_sums(given, lengths, gamma)
    return out


def reinforce_plus_plus_baseline(
    centred: Tensor, response_lengths: Sequence[int], *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Compute A_t = (r - mean(group)) - kl_coef kl_t, not whitened yet (arXiv:2501.03262).

    The paper puts its KL in the loss (`--use-kl-loss --kl-loss-type k2`); `kl_coef` subtracts it token by token.
    `centred` are the rewards minus their group's mean (`dr_grpo`). The caller whitens the advantages.
    """
    advantages = expand(centred.detach().double(), response_lengths)
    if not kl_coef:
        return advantages
    if kl is None:
        raise ValueError("kl_coef needs the KL to the reference")
    return advantages - kl_coef * kl.detach().double()


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE (arXiv:1506.02438, eq. 16) over the trained tokens of each response; tokens with mask 0 are ignored.

    For the n trained tokens of a response in order, rho_k = -kl_coef kl_k; the last one also gets the sample's reward.
    V_{n+1} = 0 after the end:

        delta_k = rho_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lambd A_{k+1},   returns_k = A_k + V_k

    Args:
        values: V of the state in which each token was chosen.

    Returns:
        Advantages and returns.
    """
    given, lengths, last = trained_rewards(rewards, loss_mask, response_lengths, kl, kl_coef)
    keep = loss_mask > 0
    v = values.detach()[keep].double()
    following = torch.cat([v[1:], v.new_zeros(min(1, v.numel()))])
    following[last] = 0.0
    delta = given + gamma * following - v
    advantages, returns = torch.zeros(2, loss_mask.numel(), dtype=torch.float64, device=values.device)
    advantages[keep] = discounted_sums(delta, lengths, gamma * lambd)
    returns[keep] = advantages[keep] + v
    return advantages, returns


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Compute (v - mean) / sqrt(variance + 1e-8), with mean and unbiased variance over all tokens with mask 1.

    Every trained token counts once, so a long response weighs more than a short one. This is the global normalization
    of REINFORCE++ (arXiv:2501.03262), and `--normalize-advantages` for the other estimators. The variance of a single
    token is 0. Masked tokens are transformed too; their weight in the loss is 0.

    Raises:
        ValueError: no token with mask 1.
    """
    keep = mask > 0
    count = keep.sum().double()
    if count.item() < 1:
        raise ValueError("whitening needs at least one token with mask 1")
    kept = torch.where(keep, values, torch.zeros_like(values)).double()
    mean = kept.sum() / count
    variance = (kept.square().sum() / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    return ((values.double() - mean) * (variance + WHITEN_EPS).rsqrt()).to(values.dtype)


def distilled_advantages(advantages: Tensor, log_probs: Tensor, teacher_log_probs: Tensor, coef: float) -> Tensor:
    """Compute A_t - coef (log_probs_t - teacher_log_probs_t), without gradients.

    The difference is the k1 estimate of KL(student || teacher) of each token that the student sampled. With advantages
    of 0 it is pure on-policy distillation (Agarwal et al., arXiv:2306.13649; Lu, "On-Policy Distillation", 2025). It is
    added before `--normalize-advantages`.

    Args:
        advantages: of any estimator.
        log_probs: of the student under the old policy.
    """
    return (advantages - coef * (log_probs - teacher_log_probs)).detach()

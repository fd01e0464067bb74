"""Group Sequence Policy Optimization: the importance ratio of whole responses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.algorithms.losses.ratio import PolicyLoss, clipped_surrogate
from instep.algorithms.segments import expand, segment_mean

GRADIENTS = ("token", "sequence")


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_lengths: Sequence[int] | Tensor,
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
        log_probs, old_log_probs, advantages: `[num_tokens]`; the gradient flows through `log_probs` only.
        mask: `[num_tokens]`, above 0 for the tokens that count in the ratio.
        response_lengths: of each sample, all of whose tokens are here.
        gradient: one of `GRADIENTS`.

    Raises:
        ValueError: mask or lengths do not fit.
    """
    log_ratio = expand(segment_mean(log_probs - old_log_probs, mask, response_lengths), response_lengths)
    if gradient == "token":
        log_ratio = log_ratio.detach() + (log_probs - log_probs.detach())
    return clipped_surrogate(
        log_ratio, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )

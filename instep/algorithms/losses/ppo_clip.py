"""The clipped policy-gradient loss of PPO, per token."""

from __future__ import annotations

from torch import Tensor

from instep.algorithms.losses.ratio import PolicyLoss, clipped_surrogate


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

    Args: all `[num_tokens]`; the gradient flows through `log_probs` only.
    """
    return clipped_surrogate(
        log_probs - old_log_probs.detach(),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )

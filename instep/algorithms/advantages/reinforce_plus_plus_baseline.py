"""REINFORCE++ with the group's mean as baseline, minus a per-token KL; whitened over the rollout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.algorithms.segments import expand


def reinforce_plus_plus_baseline(
    centred: Tensor, response_lengths: Sequence[int], *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Compute A_t = (r - mean(group)) - kl_coef kl_t, not whitened yet (arXiv:2501.03262).

    The paper puts its KL in the loss (`--use-kl-loss --kl-loss-type k2`); `kl_coef` subtracts it token by token.

    Args:
        centred: `[num_samples]`, the rewards minus their group's mean (`dr_grpo`).
        kl: `[num_response_tokens]`, old policy against reference; needed if `kl_coef` is not 0.

    Returns:
        float64 `[num_response_tokens]`; the caller whitens them (`whitening.whiten`).
    """
    advantages = expand(centred.detach().double(), response_lengths)
    if not kl_coef:
        return advantages
    if kl is None:
        raise ValueError("kl_coef needs the KL to the reference")
    return advantages - kl_coef * kl.detach().double()

"""Generalised advantage estimation, for PPO with a critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int] | Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438, eq. 16) over the trained tokens of each response; tokens with mask 0 are as if not there.

    With the n trained tokens of a response in order, rho_k = -kl_coef kl_k, to whose last one the sample's reward is
    added, and V_n = 0 after the end:

        delta_k = rho_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lambd A_{k+1},   returns_k = A_k + V_k

    Args:
        rewards: `[num_samples]`, of whole responses. A response without a trained token has no use for its own.
        values: `[num_response_tokens]`, V of the state in which each token was chosen.
        loss_mask: `[num_response_tokens]`, 0 or 1.
        response_lengths: of each sample.
        kl: `[num_response_tokens]`, any estimator of `algorithms.kl`, old policy against reference; with `kl_coef`.

    Returns:
        Advantages and returns, `[num_response_tokens]`, in the dtype of `values` (taken in float64); 0 where masked.

    Raises:
        ValueError: lengths that do not fit.
    """
    lengths, keep = [int(n) for n in response_lengths], loss_mask > 0
    if len(lengths) != rewards.numel() or not sum(lengths) == values.numel() == loss_mask.numel():
        raise ValueError(
            f"{rewards.numel()} rewards, {values.numel()} values and {loss_mask.numel()} mask entries for "
            f"{len(lengths)} responses of {sum(lengths)} tokens"
        )
    counts = torch.tensor([int(part.sum()) for part in keep.split(lengths)], dtype=torch.int64)
    trained = values[keep].double()
    rho = torch.zeros_like(trained) if kl is None else -kl_coef * kl[keep].double()
    rho[(counts.cumsum(0) - 1)[counts > 0]] += rewards[counts > 0].double()
    v = pad_sequence(list(trained.split(counts.tolist())), batch_first=True)  # [num_samples, most trained tokens]
    delta = pad_sequence(list(rho.split(counts.tolist())), batch_first=True) - v
    delta[:, :-1] += gamma * v[:, 1:]
    for t in range(v.shape[1] - 2, -1, -1):  # from right to left, delta becomes the advantage
        delta[:, t] += gamma * lambd * delta[:, t + 1]
    flat = delta[torch.arange(v.shape[1], device=v.device) < counts[:, None].to(v.device)]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[keep] = flat.to(values.dtype)
    returns[keep] = (flat + trained).to(values.dtype)
    return advantages, returns

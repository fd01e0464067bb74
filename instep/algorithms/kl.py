"""Per-token estimators of the KL divergence (John Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from torch import Tensor

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
MAX_EXPONENT = 60.0  # exp(60) is finite in float32: an overflow would make its gradient NaN even if it is clamped
LOW_VAR_CLAMP = 10.0


def approx_kl(log_probs: Tensor, base_log_probs: Tensor, kind: str, *, old_log_probs: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || base) of each sampled token, with d = log_probs - base_log_probs.

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d. low_var_kl: k3, clamped to [-10, 10]. `old_log_probs` (`--use-unbiased-kl`)
    multiplies by the importance weight exp(log_probs - old_log_probs), with its gradient, before the clamp: the samples
    come from the old policy, and the gradient is then that of the KL itself.

    Args: all `[num_tokens]`; `kind` is one of KL_TYPES.

    Raises:
        ValueError: an unknown kind.
    """
    d = log_probs - base_log_probs
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d.square() / 2
    elif kind in ("k3", "low_var_kl"):
        kl = (-d).clamp(max=MAX_EXPONENT).exp() - 1 + d
    else:
        raise ValueError(f"unknown KL estimator {kind!r}; known are {', '.join(KL_TYPES)}")
    if old_log_probs is not None:
        kl = kl * (log_probs - old_log_probs).clamp(max=MAX_EXPONENT / 2).exp()
    return kl.clamp(-LOW_VAR_CLAMP, LOW_VAR_CLAMP) if kind == "low_var_kl" else kl

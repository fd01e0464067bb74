"""On-policy distillation: the reverse KL to a teacher, as a penalty in the advantage."""

from __future__ import annotations

from torch import Tensor


def distilled_advantages(advantages: Tensor, log_probs: Tensor, teacher_log_probs: Tensor, coef: float) -> Tensor:
    """Compute A_t - coef (log_probs_t - teacher_log_probs_t), without gradients.

    The difference is the k1 estimate of KL(student || teacher) of each token that the student sampled. With advantages
    of 0 it is pure on-policy distillation (Agarwal et al., arXiv:2306.13649; Lu, "On-Policy Distillation", 2025). It is
    added before `--normalize-advantages`.

    Args:
        advantages: `[num_tokens]`, of any estimator.
        log_probs: `[num_tokens]`, of the student under the old policy.
        teacher_log_probs: `[num_tokens]`, of the same tokens.
    """
    return (advantages - coef * (log_probs - teacher_log_probs)).detach()

"""The policy loss of a micro-batch: clipped policy gradient, TIS, KL to the reference, entropy bonus; its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.algorithms.importance import truncated_importance_weights
from instep.algorithms.kl import KL_TYPES, approx_kl
from instep.algorithms.policy_loss import ppo_clip_loss


@dataclass(frozen=True)
class PolicyLossConfig:
    """What the policy loss depends on; the flags of the same names."""

    eps_clip: float = 0.2
    eps_clip_high: float | None = None  # None: as eps_clip
    eps_clip_c: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_rollout_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.kl_loss_type not in KL_TYPES:
            raise ValueError(f"kl_loss_type {self.kl_loss_type!r} is none of {', '.join(KL_TYPES)}")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ValueError(f"eps_clip_c must be greater than 1, not {self.eps_clip_c}")
        if self.use_tis and self.use_rollout_logprobs:
            raise ValueError("use_tis corrects towards recomputed log-probs; use_rollout_logprobs leaves nothing to do")
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError("kl_loss_coef acts only with use_kl_loss")

    @classmethod
    def from_args(cls, args: Any) -> PolicyLossConfig:
        """The fields, read from the flat arguments of the same names."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


class LossTerms(NamedTuple):
    """The loss to differentiate; detached metrics to add up (`sums`) and to maximise (`maxes`) over a step."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxes: dict[str, Tensor]


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    config: PolicyLossConfig,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossTerms:
    """sum_t w_t (tis_t * ppo_t - entropy_coef * H_t + kl_loss_coef * kl_t), w = `loss_weights`.

    The ratio's base is `rollout_log_probs` with `use_rollout_logprobs`, else `old_log_probs`, else the current ones
    (ratio 1). Tokens of weight 0 have no part in anything, whatever stands there (NaN too). The metrics are weighted
    like the loss; those of the gap between trainer and engine cover the tokens whose `rollout_log_probs` are not NaN,
    and are to be divided by `log_prob_gap_coverage` once they are summed (`training.losses.finish_metrics` does it).

    Args: all `[num_response_tokens]`; what `config` needs must be there.
    """
    trained = loss_weights > 0

    def only(values: Tensor) -> Tensor:
        return torch.where(trained, values, torch.zeros_like(values))

    def mean(values: Tensor) -> Tensor:
        return (loss_weights * values).sum()

    current, advantages = only(log_probs), only(advantages)
    scored = current.detach() if old_log_probs is None else only(old_log_probs)
    old = only(_needed(rollout_log_probs, "rollout_log_probs")) if config.use_rollout_logprobs else scored
    policy = ppo_clip_loss(
        current,
        old,
        advantages,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
    )
    token_loss = policy.loss
    sums = {"log_prob": mean(current.detach()), "pg_clipfrac": mean(policy.clipped), "ppo_kl": mean(policy.ppo_kl)}
    if config.use_tis:
        tis = truncated_importance_weights(
            scored,
            only(_needed(rollout_log_probs, "rollout_log_probs")),
            low=config.tis_clip_low,
            high=config.tis_clip,
        )
        token_loss = token_loss * tis.weights
        sums |= {"tis": mean(tis.raw), "tis_clipfrac": mean(tis.clipped)}
    loss = mean(token_loss)
    sums["pg_loss"] = loss.detach()
    if entropy is not None:
        bonus = mean(only(entropy))
        sums["entropy"] = bonus.detach()
        loss = loss - config.entropy_coef * bonus if config.entropy_coef else loss
    elif config.entropy_coef:
        _needed(entropy, "entropy")
    if config.use_kl_loss:
        reference = only(_needed(ref_log_probs, "ref_log_probs"))
        weight_base = old if config.use_unbiased_kl else None
        kl_loss = mean(approx_kl(current, reference, config.kl_loss_type, old_log_probs=weight_base))
        sums["kl_loss"] = kl_loss.detach()
        loss = loss + config.kl_loss_coef * kl_loss if config.kl_loss_coef else loss
    sums |= {"loss": loss.detach(), "loss_weight": loss_weights.sum()}
    maxes: dict[str, Tensor] = {}
    if rollout_log_probs is not None:
        covered = trained & ~rollout_log_probs.isnan()
        engine = torch.where(covered, rollout_log_probs, scored)
        gap = (scored - engine).abs()
        sums |= {
            "log_prob_gap_mean": mean(gap),
            "engine_kl": mean(approx_kl(engine, scored, "k3")),
            "log_prob_gap_coverage": mean(covered.to(gap.dtype)),
        }
        maxes["log_prob_gap_max"] = gap.max() if gap.numel() else gap.new_zeros(())
    return LossTerms(loss, sums, maxes)


def _needed(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise ValueError(f"this loss needs {name}")
    return column

"""The policy loss of a micro-batch (ratio form, corrections, KL and entropy) and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.algorithms.catalog import algorithm_of
from instep.algorithms.kl import KL_TYPES, approx_kl
from instep.algorithms.losses import forms
from instep.algorithms.losses.importance import (
    LEVELS,
    MODES,
    bounded_weights,
    importance_ratio,
    off_policy_sequence_mask,
    rejection_mask,
)
from instep.arguments.settings import Settings


@dataclass(frozen=True)
class PolicyLossConfig:
    """The settings of the policy loss: the form of the algorithm, and the flags of the same names."""

    form: str = "ppo_clip"  # a key of FORMS
    eps_clip: float = 0.2
    eps_clip_high: float | None = None  # None: as eps_clip
    eps_clip_c: float | None = None
    gspo_gradient: str = "token"
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_level: str = "token"
    tis_mode: str = "clip"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_rs: bool = False
    rs_level: str = "token"
    rs_lower_bound: float | None = None  # None: tis_clip_low
    rs_upper_bound: float | None = None  # None: tis_clip
    rs_veto_threshold: float | None = None
    use_opsm: bool = False
    opsm_delta: float = 1e-4

    def __post_init__(self) -> None:
        for name, known in (
            ("form", FORMS),
            ("gspo_gradient", forms.GRADIENTS),
            ("kl_loss_type", KL_TYPES),
            ("tis_level", LEVELS),
            ("rs_level", LEVELS),
            ("tis_mode", MODES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ValueError(f"eps_clip_c must be greater than 1, not {self.eps_clip_c}")
        if self.form in _AROUND_ROLLOUT and not self.use_rollout_logprobs:
            raise ValueError(f"{self.form} bounds the change since sampling: it needs use_rollout_logprobs")
        if (self.use_tis or self.use_rs) and self.use_rollout_logprobs:
            raise ValueError(
                "use_tis and use_rs correct towards recomputed log-probs; with use_rollout_logprobs they have no effect"
            )
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError("kl_loss_coef acts only with use_kl_loss")

    @property
    def reads_rollout_log_probs(self) -> tuple[str, ...]:
        """See `flags_that_compare`; with one of them every trained token needs the engine's log-prob."""
        return flags_that_compare(self.form, self)

    @property
    def bounds(self) -> dict[str, Any]:
        """Return the bounds of a ratio or a divergence, as keyword arguments of a form."""
        return {name: getattr(self, name) for name in ("eps_clip", "eps_clip_high", "eps_clip_c")}

    @classmethod
    def from_args(cls, args: Settings) -> PolicyLossConfig:
        """Return the settings of a run: arguments of the same names, and the form of its algorithm."""
        form = algorithm_of(args).loss.name
        return cls(form, **{name: getattr(args, name) for name in cls.__dataclass_fields__ if name != "form"})


# (config, current log-probs, old ones, advantages, mask: all `[num_tokens]`, response lengths) -> PolicyLoss
Form = Callable[..., forms.PolicyLoss]
FORMS: dict[str, Form] = {
    "ppo_clip": lambda c, now, old, a, *_: forms.ppo_clip_loss(now, old, a, **c.bounds),
    "gspo": lambda c, *columns: forms.gspo_loss(*columns, **c.bounds, gradient=c.gspo_gradient),
    "cispo": lambda c, now, old, a, *_: forms.cispo_loss(
        now, old, a, eps_clip=c.eps_clip, eps_clip_high=c.eps_clip_high
    ),
    "sapo": lambda c, now, old, a, *_: forms.sapo_loss(now, old, a, tau_pos=c.sapo_tau_pos, tau_neg=c.sapo_tau_neg),
    "dppo_tv": lambda c, now, old, a, *_: forms.dppo_loss(now, old, a, divergence="tv", **c.bounds),
    "dppo_kl": lambda c, now, old, a, *_: forms.dppo_loss(now, old, a, divergence="kl", **c.bounds),
}
_AROUND_ROLLOUT = ("dppo_tv", "dppo_kl")


def flags_that_compare(form: str, settings: PolicyLossConfig | Settings) -> tuple[str, ...]:
    """Return the given flags with which the loss divides the trainer's probabilities by the engine's."""
    old = f"--advantage-estimator {form}" if form in _AROUND_ROLLOUT else "--use-rollout-logprobs"
    flags = {"--use-tis": settings.use_tis, "--use-rs": settings.use_rs, old: settings.use_rollout_logprobs}
    return tuple(flag for flag, is_on in flags.items() if is_on)


class LossTerms(NamedTuple):
    """The loss to differentiate; detached metrics of a step to sum (`sums`) or to take the maximum of (`maxes`)."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxes: dict[str, Tensor]


class Correction(NamedTuple):
    """Token losses corrected for the gap trainer - engine, tokens to keep (1.0 or 0.0), metrics; all `[num_tokens]`."""

    loss: Tensor
    keep: Tensor
    metrics: dict[str, Tensor]


# (token loss, trainer's log-probs, engine's log-probs, mask) -> Correction; all `[num_tokens]`
Correct = Callable[[Tensor, Tensor, Tensor, Tensor], Correction]
Reduce = Callable[[Tensor, Tensor], Tensor]  # (token loss, mask) -> scalar


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    response_lengths: Tensor,
    config: PolicyLossConfig,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    older: Tensor | None = None,
    entropy: Tensor | None = None,
    correct: Correct | None = None,
    reduce: Reduce | None = None,
) -> LossTerms:
    """Compute sum_t w_t (c_t * pg_t - entropy_coef * H_t + kl_loss_coef * kl_t), w = `loss_weights`.

    pg is the form `config.form`, and c is the product of its corrections: weights (`use_tis`), rejection (`use_rs`) and
    off-policy sequence masking (`use_opsm`). They do not change the denominators in w. The ratio's base is
    `rollout_log_probs` with `use_rollout_logprobs`, otherwise `old_log_probs`, otherwise the current ones (ratio 1).
    For tokens `older` than the rollout's weights it is `rollout_log_probs`, unless `use_tis` corrects for these. Values
    at tokens of weight 0 (NaN too) are ignored everywhere. The metrics are weighted like the loss. Those of the gap
    between trainer and engine cover tokens that are not `older` and whose `rollout_log_probs` are not NaN;
    `training.losses.finish_metrics` divides their sums by `log_prob_gap_coverage`. The effective sample size has its
    own sums, and covers older tokens, too.

    Args:
        log_probs, ...: `[num_response_tokens]` each, all tokens of each sample; `config` decides which ones are needed.
        response_lengths: `[num_samples]`.
        older: 1.0 or 0.0; see `data.batch.older_tokens`.
        correct: replaces `use_tis` and `use_rs`.
        reduce: replaces sum_t w_t x_t for the policy gradient (not for KL, entropy, metrics).

    Raises:
        ValueError: a column is missing, or lengths do not fit.
    """
    trained = loss_weights > 0

    def only(values: Tensor) -> Tensor:
        return torch.where(trained, values, torch.zeros_like(values))

    def mean(values: Tensor) -> Tensor:
        return (loss_weights * values).sum()

    current, advantages, mask = only(log_probs), only(advantages), trained.to(log_probs.dtype)
    scored = current.detach() if old_log_probs is None else only(old_log_probs)
    old = only(_needed(rollout_log_probs, "rollout_log_probs")) if config.use_rollout_logprobs else scored
    if older is not None and not (config.use_rollout_logprobs or config.use_tis or correct is not None):
        old = torch.where(older > 0, only(_needed(rollout_log_probs, "rollout_log_probs")), old)
    policy = FORMS[config.form](config, current, old, advantages, mask, response_lengths)
    token_loss, keep = policy.loss, mask
    sums = {"log_prob": mean(current.detach()), "pg_clipfrac": mean(policy.clipped), "ppo_kl": mean(policy.ppo_kl)}
    if config.use_opsm:
        kept = off_policy_sequence_mask(current, old, advantages, mask, response_lengths, delta=config.opsm_delta)
        token_loss = token_loss * kept
        sums["opsm_clipfrac"] = mean(1 - kept)
    if correct is not None or config.use_tis or config.use_rs:
        engine = only(_needed(rollout_log_probs, "rollout_log_probs"))
        correct = correct or _built_in_correction(config, response_lengths)
        token_loss, keep, metrics = correct(token_loss, scored, engine, mask)
        token_loss = only(token_loss) * keep
        sums |= {name: mean(only(value.detach())) for name, value in metrics.items()}
    loss = mean(token_loss) if reduce is None else reduce(token_loss, keep * mask)
    sums["pg_loss"] = loss.detach()
    if entropy is not None or config.entropy_coef:
        bonus = mean(only(_needed(entropy, "entropy")))
        sums["entropy"] = bonus.detach()
        loss = loss - config.entropy_coef * bonus if config.entropy_coef else loss
    if config.use_kl_loss:
        reference, base = only(_needed(ref_log_probs, "ref_log_probs")), old if config.use_unbiased_kl else None
        kl_loss = mean(approx_kl(current, reference, config.kl_loss_type, old_log_probs=base))
        sums["kl_loss"] = kl_loss.detach()
        loss = loss + config.kl_loss_coef * kl_loss if config.kl_loss_coef else loss
    sums |= {"loss": loss.detach(), "loss_weight": loss_weights.sum()}
    if rollout_log_probs is None:
        return LossTerms(loss, sums, {})
    fresh = rollout_log_probs if older is None else rollout_log_probs.masked_fill(older > 0, torch.nan)
    gaps, largest = _gap(scored, fresh, loss_weights)
    gaps |= _importance(scored, rollout_log_probs, loss_weights)
    return LossTerms(loss, sums | gaps, {"log_prob_gap_max": largest})


def _built_in_correction(config: PolicyLossConfig, response_lengths: Tensor) -> Correct:
    """Apply `use_tis` and `use_rs` as one function."""

    def correct(loss: Tensor, train: Tensor, engine: Tensor, mask: Tensor) -> Correction:
        keep, metrics = mask, dict[str, Tensor]()
        if config.use_tis:
            ratio = importance_ratio(train, engine, mask, response_lengths, config.tis_level)
            tis = bounded_weights(ratio, config.tis_mode, low=config.tis_clip_low, high=config.tis_clip)
            loss = loss * tis.weights
            metrics |= {"tis": tis.raw, "tis_clipfrac": tis.clipped}
        if config.use_rs:
            low, high = config.rs_lower_bound, config.rs_upper_bound
            keep = rejection_mask(
                train,
                engine,
                mask,
                response_lengths,
                level=config.rs_level,
                low=config.tis_clip_low if low is None else low,
                high=config.tis_clip if high is None else high,
                veto_threshold=config.rs_veto_threshold,
            )
            metrics["rs_clipfrac"] = 1 - keep
        return Correction(loss, keep, metrics)

    return correct


def _gap(scored: Tensor, rollout_log_probs: Tensor, loss_weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return weighted sums, and the maximum, of the gap to the engine over trained tokens with engine log-probs."""
    covered = (loss_weights > 0) & ~rollout_log_probs.isnan()
    engine = torch.where(covered, rollout_log_probs, scored)
    gap = (scored - engine).abs()
    sums = {
        "log_prob_gap_mean": (loss_weights * gap).sum(),
        "engine_kl": (loss_weights * approx_kl(engine, scored, "k3")).sum(),
        "log_prob_gap_coverage": (loss_weights * covered).sum(),
    }
    return sums, gap.max() if gap.numel() else gap.new_zeros(())


def _importance(scored: Tensor, rollout_log_probs: Tensor, loss_weights: Tensor) -> dict[str, Tensor]:
    """Return weighted sums of 1, w and w^2 over trained tokens with engine log-probs, w = trainer's probability /
    engine's."""
    known = (loss_weights > 0) & ~rollout_log_probs.isnan()
    weights = forms.exp_ratio(torch.where(known, scored - rollout_log_probs, torch.zeros_like(scored)))
    powers = (torch.ones_like(weights), weights, weights.square())
    return {f"importance_{i}": (loss_weights * known * power).sum() for i, power in enumerate(powers)}


def _needed(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise ValueError(f"this loss needs {name}")
    return column

"""The losses of `algorithms` as the backends call them: a micro-batch and its outputs in, a `LossOutput` out."""

from __future__ import annotations

import torch

from instep.algorithms.grpo import PolicyLossConfig, grpo_loss
from instep.errors import RolloutError
from instep.training.backend import LossFn, LossOutput, TokenOutputs
from instep.types import TokenBatch

__all__ = ["PolicyLossConfig", "finish_metrics", "policy_loss_fn", "sft_loss_fn"]

_REMEDY = {
    "loss_weights": "the worker fills this column from the schedule (algorithms.reductions.loss_weights)",
    "advantages": "the worker fills this column from the rewards; a custom advantage function must set it",
    "ref_log_probs": "give a reference with --ref-load, or leave out --use-kl-loss",
    "rollout_log_probs": "let the generate function keep the engine's log-probs, or leave out --use-tis and "
    "--use-rollout-logprobs",
}
_GAP = ("log_prob_gap_mean", "engine_kl")


def policy_loss_fn(config: PolicyLossConfig) -> LossFn:
    """The policy loss (`algorithms.grpo.grpo_loss`) over the columns of a `TokenBatch`.

    Reads `loss_weights` and `advantages`; `log_probs` (old), `ref_log_probs`, `rollout_log_probs` where there are any.

    Raises (when called):
        RolloutError: a column that `config` needs is missing, or trained tokens lack engine log-probs that it needs.
    """

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        columns = batch.token_columns
        weights = _column(batch, "loss_weights", "every loss")
        if config.use_tis or config.use_rollout_logprobs:
            flag = "--use-tis" if config.use_tis else "--use-rollout-logprobs"
            unknown = _column(batch, "rollout_log_probs", flag).isnan() & (weights > 0)
            if bool(unknown.any()):
                raise RolloutError(
                    f"{int(unknown.sum())} trained tokens have no engine log-probs, which {flag} needs",
                    where=f"column rollout_log_probs; first sample {_first_sample(batch, unknown)}",
                    remedy=_REMEDY["rollout_log_probs"],
                )
        if config.entropy_coef and outputs.entropy is None:
            raise RolloutError("--entropy-coef needs the entropy of each token", where="outputs of the train backend")
        terms = grpo_loss(
            outputs.log_probs,
            _column(batch, "advantages", "the policy loss"),
            weights,
            config,
            old_log_probs=columns.get("log_probs"),
            ref_log_probs=_column(batch, "ref_log_probs", "--use-kl-loss") if config.use_kl_loss else None,
            rollout_log_probs=columns.get("rollout_log_probs"),
            entropy=outputs.entropy,
        )
        return LossOutput(*terms)

    return loss_fn


def sft_loss_fn() -> LossFn:
    """Supervised fine-tuning: -sum(loss_weights * log_probs) over the response tokens with mask 1."""

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        weights = _column(batch, "loss_weights", "every loss")
        log_probs = torch.where(weights > 0, outputs.log_probs, torch.zeros_like(outputs.log_probs))
        loss = -(weights * log_probs).sum()
        return LossOutput(loss, {"loss": loss.detach(), "loss_weight": weights.sum()})

    return loss_fn


def finish_metrics(sums: dict[str, float], maxes: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from its `sums` and `maxes`, added up over all micro-batches and data-parallel ranks.

    The trainer-engine gap becomes the mean over the tokens that have engine log-probs; where none has, its metrics are
    left out ("not available") and only `log_prob_gap_coverage` = 0 stays.
    """
    out = {**sums, **maxes}
    if "log_prob_gap_coverage" not in out:
        return out
    covered, total = out["log_prob_gap_coverage"], out["loss_weight"]
    out["log_prob_gap_coverage"] = covered / total if total > 0 else 0.0
    for name in _GAP:
        value = out.pop(name)
        if covered > 0:
            out[name] = value / covered
    if covered <= 0:
        out.pop("log_prob_gap_max", None)
    return out


def _column(batch: TokenBatch, name: str, needed_by: str) -> torch.Tensor:
    if name not in batch.token_columns:
        raise RolloutError(
            f"{needed_by} needs the column {name}",
            where=f"batch of {batch.num_samples} samples with {', '.join(sorted(batch.token_columns)) or 'no columns'}",
            remedy=_REMEDY[name],
        )
    return batch.token_columns[name]


def _first_sample(batch: TokenBatch, tokens: torch.Tensor) -> int:
    """Which sample of the batch the first marked token belongs to; its `index` where that is known."""
    position = int(tokens.nonzero()[0])
    row = int((batch.response_lengths.cumsum(0) <= position).sum())
    index = batch.sample_columns.get("index")
    return row if index is None else int(index[row])

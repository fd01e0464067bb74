"""The losses of `algorithms` as functions for a train backend: micro-batch and outputs -> `LossOutput`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from instep.algorithms.losses.offline import dpo_loss, sft_loss
from instep.algorithms.losses.policy import PolicyLossConfig, policy_loss
from instep.algorithms.losses.value import value_loss
from instep.algorithms.segments import segment_sum
from instep.arguments.settings import AlgorithmSettings
from instep.errors import RolloutError
from instep.training.backend import LossFn, LossOutput, ParallelInfo, TokenOutputs
from instep.training.loss_hooks import LossHooks, custom_loss_fn
from instep.types import TokenBatch

_REMEDY = {
    "loss_weights": "the worker fills this column from the schedule (algorithms.reductions.loss_weights)",
    "advantages": "the worker fills this column from the rewards; a custom advantage function must set it",
    "ref_log_probs": "give a reference with --ref-load, or remove --use-kl-loss",
    "rollout_log_probs": "keep the engine's log-probs in the generate function, or remove the flags that need them",
}
_GAP = ("log_prob_gap_mean", "engine_kl")
# Weighted like the loss. Its weights sum to less than 1 if samples are masked out, and to any value with
# --constant-loss-length.
_MEANS = "log_prob entropy pg_clipfrac ppo_kl kl_loss tis tis_clipfrac rs_clipfrac opsm_clipfrac value_clipfrac".split()


def loss_fn_from_args(args: AlgorithmSettings) -> LossFn:
    """Return the loss of `--loss-type`, with the users' functions for it."""
    return LOSSES[args.loss_type](args)


def policy_loss_fn(config: PolicyLossConfig, hooks: LossHooks | None = None) -> LossFn:
    """Return the policy loss (`algorithms.losses.policy.policy_loss`) over the columns of a `TokenBatch`.

    It reads `loss_weights` and `advantages`. If they exist, it also reads `log_probs` (old), `ref_log_probs`,
    `rollout_log_probs` and `older`.

    Raises (when called):
        RolloutError: a needed column is missing, or trained tokens do not have engine log-probs.
    """
    hooks = hooks or LossHooks()

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        columns = batch.token_columns
        weights = _column(batch, "loss_weights", "every loss")
        if config.reads_rollout_log_probs:
            flag = " and ".join(config.reads_rollout_log_probs)
            unknown = _column(batch, "rollout_log_probs", flag).isnan() & (weights > 0)
            if bool(unknown.any()):
                raise RolloutError(
                    f"{int(unknown.sum())} trained tokens have no engine log-probs, which {flag} needs",
                    where=f"column rollout_log_probs; first sample {_first_sample(batch, unknown)}",
                    remedy=_REMEDY["rollout_log_probs"],
                )
        terms = policy_loss(
            outputs.log_probs,
            _column(batch, "advantages", "the policy loss"),
            weights,
            batch.response_lengths,
            config,
            old_log_probs=columns.get("log_probs"),
            ref_log_probs=_column(batch, "ref_log_probs", "--use-kl-loss") if config.use_kl_loss else None,
            rollout_log_probs=columns.get("rollout_log_probs"),
            older=columns.get("older"),
            entropy=outputs.entropy,
            correct=hooks.correction(batch) if config.use_tis else None,
            reduce=hooks.reduction(batch),
        )
        return LossOutput(*terms)

    return loss_fn


def sft_loss_fn() -> LossFn:
    """Return the loss of supervised fine-tuning (`algorithms.losses.sft.sft_loss`)."""

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        weights = _column(batch, "loss_weights", "every loss")
        loss = sft_loss(outputs.log_probs, weights)
        return LossOutput(loss, {"loss": loss.detach(), "loss_weight": weights.sum()})

    return loss_fn


def dpo_loss_fn(beta: float, label_smoothing: float = 0.0) -> LossFn:
    """Return the DPO loss (`algorithms.losses.dpo.dpo_loss`): the mean over the pairs of a step.

    The samples alternate (chosen, rejected, chosen, ...); the two samples of a pair have the same `execution_id`. The
    loss reads `loss_mask`, `ref_log_probs` and the sample column `loss_scale`, which is 1 / (number of pairs in the
    step).

    Raises (when called):
        RolloutError: half of a pair is missing, or there are no `ref_log_probs`.
    """

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        ids = batch.sample_columns["execution_id"]
        if ids[::2] != ids[1::2]:
            raise RolloutError(
                "the micro-batch is not made of pairs (chosen, rejected)",
                where=f"executions {ids[:6]}",
                remedy="a rollout function for DPO returns groups of [chosen, rejected] with one execution_id",
            )
        mask, reference = batch.token_columns["loss_mask"], _column(batch, "ref_log_probs", "DPO")
        now, before = (
            segment_sum(x, mask, batch.response_lengths).view(-1, 2).unbind(1) for x in (outputs.log_probs, reference)
        )
        pairs = dpo_loss(*now, *before, beta=beta, label_smoothing=label_smoothing)
        weights = batch.sample_columns["loss_scale"][::2]
        loss, margins = (weights * pairs.loss).sum(), pairs.chosen_rewards - pairs.rejected_rewards
        means = {
            "reward_margin": margins,
            "reward_accuracy": (margins > 0).float(),
            "chosen_reward": pairs.chosen_rewards,
            "rejected_reward": pairs.rejected_rewards,
            "chosen_log_prob": now[0].detach(),
            "rejected_log_prob": now[1].detach(),
        }
        sums = {name: (weights * values).sum() for name, values in means.items()}
        return LossOutput(loss, {"loss": loss.detach(), "loss_weight": weights.sum(), **sums})

    return loss_fn


def value_loss_fn(value_clip: float) -> LossFn:
    """Return the critic's loss (`algorithms.losses.value.value_loss`), weighted by `loss_weights`.

    It reads the columns `values` (from which the advantages were made) and `returns`.
    """

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        assert outputs.values is not None, "a critic's backend has values"
        weights, columns = batch.token_columns["loss_weights"], batch.token_columns
        zeros = torch.zeros_like(weights)  # replaces the content at tokens of weight 0, such as NaN of a hook's returns
        old, returns = (torch.where(weights > 0, columns[name], zeros) for name in ("values", "returns"))
        tokens = value_loss(outputs.values, old, returns, value_clip=value_clip)
        loss = (weights * tokens.loss).sum()
        sums = {"loss": loss.detach(), "value_clipfrac": (weights * tokens.clipped).sum(), "loss_weight": weights.sum()}
        return LossOutput(loss, sums)

    return loss_fn


# By `--loss-type`: the losses that algorithms name, and the user's own loss, which replaces the policy loss.
LOSSES: dict[str, Callable[[Any], LossFn]] = {
    "policy_loss": lambda args: policy_loss_fn(PolicyLossConfig.from_args(args), LossHooks.from_args(args)),
    "sft_loss": lambda args: sft_loss_fn(),
    "dpo_loss": lambda args: dpo_loss_fn(args.dpo_beta, args.dpo_label_smoothing),
    "custom_loss": custom_loss_fn,
}


def metrics_of_step(outputs: list[LossOutput], parallel: ParallelInfo) -> dict[str, float]:
    """Return the metrics of a step over all micro-batches and data-parallel ranks, which all have the same names."""
    sums = {n: torch.stack([o.sums[n].float() for o in outputs]).sum() for n in outputs[0].sums}
    maxes = {n: torch.stack([o.maxes[n].float() for o in outputs]).max() for n in outputs[0].maxes}
    total = torch.stack(list(sums.values())).double()
    largest = torch.stack([*maxes.values(), torch.zeros((), device=total.device)]).double()
    if parallel.dp_size > 1:
        dist.all_reduce(total, group=parallel.dp_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.dp_group)
    return finish_metrics(
        dict(zip(sums, total.tolist(), strict=True)), dict(zip(maxes, largest.tolist()[:-1], strict=True))
    )


def finish_metrics(sums: dict[str, float], maxes: dict[str, float]) -> dict[str, float]:
    """Compute the metrics of a step from its `sums` and `maxes` over all micro-batches and data-parallel ranks.

    A metric that is a mean over tokens is divided by the sum of the weights. The trainer-engine gap becomes the mean
    over the tokens with engine log-probs. If no token has one, its metrics are left out ("not available"), and only
    `log_prob_gap_coverage` = 0 remains. The effective sample size (Kish: the squared sum of the importance weights over
    the sum of their squares) is a fraction of these tokens, older ones included.
    """
    out = {**sums, **maxes}
    if out.get("loss_weight", 0.0) > 0:
        out |= {name: out[name] / out["loss_weight"] for name in _MEANS if name in out}
    if "mtp_weight" in out:
        out["mtp_loss"] /= out.pop("mtp_weight") or 1.0
    if "log_prob_gap_coverage" not in out:
        return out
    covered, total = out["log_prob_gap_coverage"], out["loss_weight"]
    known, first, second = (out.pop(f"importance_{i}") for i in range(3))
    if known > 0:
        out["effective_sample_ratio"] = first**2 / (known * second)
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
    """Return the sample of the first marked token: its `index` if known, otherwise its place in the batch."""
    position = int(tokens.nonzero()[0])
    row = int((batch.response_lengths.cumsum(0) <= position).sum())
    index = batch.sample_columns.get("index")
    return row if index is None else int(index[row])

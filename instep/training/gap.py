"""The log-prob gap as a proof: engine and trainer must give tokens of the current weights the same log-probs.

Between two syncs nothing else shows which weights an engine holds. The tokens of a round do: the engine's log-probs
came with them, and the trainer computes its own in any case. Both must be of the proven version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from instep.data.batch import is_older, marked_tokens
from instep.data.sampling import truncated_by
from instep.training.backend import LossFn, LossOutput, TokenOutputs
from instep.types import Sample, TokenBatch

COLUMN = "fresh"


def fresh_tokens(samples: Sequence[Sample], version: int) -> torch.Tensor:
    """Mark the response tokens that weight version `version` made; both sides must give them the same log-probs.

    Not marked: tokens of an older version or without a version, and samples with sampling parameters that change the
    distribution of the engine's log-probs (top-p, penalties, ...).

    Returns:
        float32 `[num_response_tokens]` of 0 and 1.
    """
    return marked_tokens(
        samples,
        lambda s: [p for p in s.weight_versions if not is_older(p.version, version)] if not truncated_by(s) else [],
    )


class FreshGap:
    """Adds up the gap over the fresh tokens of micro-batches, before the optimizer's step on them."""

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, batch: TokenBatch, log_probs: torch.Tensor) -> None:
        """Add |trainer - engine| over the trained fresh tokens; `log_probs` are the trainer's.

        Values that are not finite are left out: the trainer made them, and skips their step.
        """
        columns = batch.token_columns
        engine = columns["rollout_log_probs"]
        counted = (columns[COLUMN] > 0) & (columns["loss_weights"] > 0) & ~engine.isnan() & log_probs.isfinite()
        gaps = torch.where(counted, (log_probs.detach() - engine).abs(), torch.zeros_like(engine))
        self._sums += torch.stack([gaps.double().sum(), counted.double().sum()]).to(self._sums.device)

    def mean(self) -> float:
        """Return the mean over all ranks (collective); 0 without fresh tokens.

        A token that several ranks have scored counts equally often in both sums.
        """
        dist.all_reduce(self._sums)
        total, count = self._sums.tolist()
        return total / count if count else 0.0


def measured(gap: FreshGap | None, batch: TokenBatch, loss_fn: LossFn) -> LossFn:
    """Return a loss that also adds to the gap. For a `batch` with scores, add its gap now; the loss stays as it is."""
    if gap is None:
        return loss_fn
    if (scored := batch.token_columns.get("log_probs")) is not None:
        gap.add(batch, scored)
        return loss_fn

    def loss(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        gap.add(batch, outputs.log_probs)
        return loss_fn(batch, outputs)

    return loss

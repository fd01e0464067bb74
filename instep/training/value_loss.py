"""The critic's loss as the backends call it; the formula is `algorithms.losses.value`."""

from __future__ import annotations

import torch

from instep.algorithms.losses.value import value_loss
from instep.training.backend import LossFn, LossOutput, TokenOutputs
from instep.types import TokenBatch


def value_loss_fn(value_clip: float) -> LossFn:
    """sum(loss_weights * value_loss) over the columns `values` (those that the advantages are from) and `returns`."""

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        assert outputs.values is not None, "a critic's backend has values"
        weights, columns = batch.token_columns["loss_weights"], batch.token_columns
        zeros = torch.zeros_like(weights)  # for what stands at tokens of weight 0, NaN of a hook's returns among it
        old, returns = (torch.where(weights > 0, columns[name], zeros) for name in ("values", "returns"))
        tokens = value_loss(outputs.values, old, returns, value_clip=value_clip)
        loss = (weights * tokens.loss).sum()
        return LossOutput(loss, {"value_clipfrac": (weights * tokens.clipped).sum()})

    return loss_fn

"""Router replay: the routers of a micro-batch's forward pass use the experts that an engine chose for each token.

These experts travel with the micro-batch through the layers. So a layer that is computed again in the backward pass, or
between layers of other micro-batches in a pipeline, gets those of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import RolloutError
from instep.models.shape import ModelShape
from instep.types import TokenBatch

COLUMN = "routed_experts"  # a list of `[num_tokens, num_layers, experts per token]`, one array per sample
_REMEDY = "serve the model that is trained; vLLM returns routes for each layer with --enable-return-routed-experts"


class Replay:
    """Replaces the top-k choice of Megatron's router; without given experts, the router's own scores decide.

    Attributes:
        experts: whole numbers `[num_tokens, experts per token]`.
        noted: stores the router's own choices, if they are kept, under `layer`.
    """

    experts: Tensor | None = None
    noted: dict[int, Tensor] | None = None
    layer: int = 0

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, best: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores, through which the gradient flows, and the numbers of each token's experts."""
        if self.experts is not None:
            experts = self.experts.long()
            return scores.gather(1, experts), experts
        own: tuple[Tensor, Tensor] = best(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.noted is not None:
            self.noted[self.layer] = own[1].to(torch.int16)
        return own


def routes_of(batch: TokenBatch, shape: ModelShape, rows: Tensor, share: tuple[int, int]) -> Tensor | None:
    """Return the experts of a rank's tokens, `[num_tokens, num_layers, experts per token]` on the batch's device; None
    if each router chooses itself.

    Args:
        rows: for each token of the context-parallel rank, its position in the stream of the batch.
        share: the part of them that this rank routes, and the number of parts (sequence parallelism).

    Raises:
        RolloutError: they belong to another model, or a token has an expert twice.
    """
    if COLUMN not in batch.sample_columns or shape.experts is None:
        return None
    found, experts = np.concatenate(batch.sample_columns[COLUMN]), shape.experts
    wanted = (shape.num_layers, experts.num_active)
    if found.shape[1:] != wanted or found.max() >= experts.num:
        what = f"routed experts of {found.shape[1:]} (layers, experts per token), up to number {found.max()}"
        what += f"; the model has {wanted}, {experts.num} experts"
        raise RolloutError(what, where="--use-rollout-routing-replay", remedy=_REMEDY)
    layers = list(experts.layers)
    if has_twice(found if len(layers) == shape.num_layers else found[:, layers]):
        what = "a token has the same expert twice: the engine has not recorded its route"
        raise RolloutError(what, where="--use-rollout-routing-replay", remedy=_REMEDY)
    return torch.from_numpy(found).to(rows.device)[rows].chunk(share[1])[share[0]]


def has_twice(routes: np.ndarray) -> bool:
    """Return whether a token has an expert twice in a layer: `[num_tokens, num_layers, experts per token]`.

    Pairs of columns are compared: this takes a tenth of the time of sorting the experts of each token.
    """
    columns = np.ascontiguousarray(routes.reshape(-1, routes.shape[-1]).T)
    return any(bool((one == other).any()) for i, one in enumerate(columns) for other in columns[:i])


def before_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the router of a layer with experts the choices of the micro-batch, if there are any: a forward pre-hook."""
    packed, replay, number = kwargs["packed_seq_params"], layer.mlp.router.router_replay, layer.layer_number
    replay.layer, replay.noted, replay.experts = number, packed.noted, None
    if packed.routes is not None:
        replay.experts = packed.routes[:, number - 1]
    elif packed.chosen is not None:
        replay.experts = packed.chosen[number]

"""The cache of gated delta nets: a state per running request, which each token changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

KIND = "linear_attention"  # in `layer_types` of transformers


class States(Cache):
    """The part of a runner's cache for gated delta nets.

    Attributes:
        states: the last inputs of the convolutions, `[nets, rows, channels, width]`, and what the nets remember,
            `[nets, rows, heads, key_dim, value_dim]`; empty without such layers.
        source, first_row: in a prefill, the sequence of the batch for each new row, and the first of these rows.
        num_rows: rows of a decode step.
    """

    source: torch.Tensor | None = None
    first_row: int
    num_rows: int

    def __init__(self, model: PreTrainedModel, kinds: Sequence[str]):
        """Create it, for layers of `kinds`."""
        super().__init__(layers=[])
        nets = [i for i, kind in enumerate(kinds) if kind == KIND]
        self.states: list[torch.Tensor] = []
        if nets:
            one = DynamicCache(config=model.config)
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=one, use_cache=True)
            first: Any = one.layers[nets[0]]
            kept = (first.conv_states[0], first.recurrent_states[0])
            self.states = [x.new_zeros(len(nets), 0, *x.shape[1:]) for x in kept]
        self.layers: list[Any] = [_Net(self, nets.index(i) if i in nets else -1) for i in range(len(kinds))]

    def reserve_states(self, rows: int) -> None:
        for i, x in enumerate(self.states):
            if rows > x.shape[1]:
                self.states[i] = torch.cat((x, x.new_zeros(len(x), rows - x.shape[1], *x.shape[2:])), 1)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.source is None

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **other: Any) -> torch.Tensor:
        """Keep the last inputs of a prefill, `[1, channels, length]`."""
        kept = self.states[0][self.layers[layer_idx].place]
        self._fill(kept, F.pad(conv_states, (kept.shape[2], 0))[..., -kept.shape[2] :])
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **other: Any) -> torch.Tensor:
        kept = self.states[1][self.layers[layer_idx].place]
        if self.source is None:
            kept[: self.num_rows] = recurrent_states
        else:
            self._fill(kept, recurrent_states)
        return recurrent_states

    def _fill(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        assert self.source is not None
        kept[self.first_row : self.first_row + len(self.source)] = new[self.source]


class _Net:
    """Shows the states of a decode step where transformers' layers look for them."""

    record_past = False

    def __init__(self, cache: States, place: int):
        self._cache, self.place = cache, place

    @property
    def conv_states(self) -> list[torch.Tensor]:
        return [self._cache.states[0][self.place, : self._cache.num_rows]]  # the layer writes into it

    @property
    def recurrent_states(self) -> list[torch.Tensor]:
        return [self._cache.states[1][self.place, : self._cache.num_rows]]

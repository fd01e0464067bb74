"""Drafters of multi-token prediction: an engine receives their weights together with those of its model.

vLLM keeps the drafter as a second model, which shares the embedding and the output layer of the first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from instep_engine.receiving import Receiving

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


class WithDrafter(nn.Module):
    """A model and its drafter, as one model whose weights are loaded.

    Args:
        num_layers: of the model; a checkpoint of DeepSeek-V3 has the drafter's behind them.
    """

    def __init__(self, model: nn.Module, drafter: nn.Module, num_layers: int):
        super().__init__()
        self.served, self.drafter, self._num_layers = model, drafter, num_layers

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = list(weights)
        self.served.load_weights(iter(tensors))
        if own := [(name, tensor) for name, tensor in tensors if self._drafts(name)]:
            self.drafter.load_weights(iter(own))

    def _drafts(self, name: str) -> bool:
        layer = _LAYER.match(name)
        behind = layer is not None and int(layer[1]) >= self._num_layers
        return (behind or name.startswith("mtp.")) and not name.endswith(_SHARED)


def install() -> None:
    """Let the weight transfer of a worker load its drafter, too. Once in a process."""
    from vllm.v1.worker.gpu_worker import Worker

    load: Any = Worker.load_model
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        how, engine = self.speculative_config, self.weight_transfer_engine
        if how is not None and how.method == "mtp" and isinstance(engine, Receiving):
            engine.follow(self.get_draft_model())

    Worker.load_model = load_model  # type: ignore[method-assign]

"""How much rounding changes the log-probs of a model: its embeddings are rounded once more, and it scores again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

UNITS = {"bf16": 2.0**-8, "fp32": 2.0**-24}  # the distance from 1 to the next smaller number


@contextlib.contextmanager
def rounded_embedding(embedding: torch.nn.Module | None, unit: float) -> Iterator[None]:
    """Move a random half of the outputs of `embedding` one unit in the last place towards 0.

    Args:
        embedding: None on a rank without it.
        unit: the unit of the precision (`UNITS`).
    """

    def hook(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(out.device).manual_seed(0)  # ranks with the same token round it equally
        chosen = torch.empty_like(out).bernoulli_(0.5, generator=generator)
        return out * (1 - unit * chosen)

    handle = None if embedding is None else embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()

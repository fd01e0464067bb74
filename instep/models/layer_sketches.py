"""What each layer of a model returns, as a few numbers per token: where two sides begin to compute otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

WIDTH = 4


def layer_sketches(layers: Mapping[int, torch.nn.Module], run: Callable[[], object]) -> dict[int, list[list[float]]]:
    """Call `run`, a forward pass, and return what each layer returned in it, projected onto fixed random directions.

    Args:
        layers: by their place in the model. Each returns hidden states whose last dimension is the hidden size, or a
            tuple that begins with them.

    Returns:
        By layer `[num_tokens, WIDTH]`, tokens in the order of the forward pass.
    """
    found = dict[int, list[list[float]]]()

    def note(place: int, out: Any) -> None:
        states = (out[0] if isinstance(out, tuple) else out).detach().float()
        size = states.shape[-1]
        directions = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0)).to(states.device)
        found.setdefault(place, []).extend((states.reshape(-1, size) @ directions).tolist())

    def hook(place: int) -> Callable[..., None]:
        return lambda _module, _given, out: note(place, out)

    handles = [module.register_forward_hook(hook(place)) for place, module in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found

"""The experts that a transformers model chose in a forward pass (`instep/routes.py`)."""

import functools
import re
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from instep.routes import as_routes


class Recorder:
    """Notes what the modules `...layers.N...experts` are called with: hidden states and `[num_tokens, top_k]` numbers.

    Raises:
        ValueError: the model has no such module.
    """

    def __init__(self, model: PreTrainedModel):
        self.num_layers, self._noted = model.config.get_text_config().num_hidden_layers, dict[int, torch.Tensor]()
        for name, module in model.named_modules():
            if found := re.search(r"\blayers\.(\d+)\..*\bexperts$", name):
                module.register_forward_pre_hook(functools.partial(self._note, int(found[1])))
                self._noted[int(found[1])] = torch.empty(0)
        if not self._noted:
            raise ValueError("--enable-return-routed-experts: this model has no experts that tokens are routed to")

    def _note(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._noted[layer] = args[1]

    def rows(self) -> np.ndarray:
        """Those of the last forward pass, `[num_tokens, num_layers, top_k]`; zeros in dense layers."""
        some = next(iter(self._noted.values()))
        none = torch.zeros_like(some)
        return as_routes(torch.stack([self._noted.get(i, none) for i in range(self.num_layers)], dim=1).cpu().numpy())

"""The layers of a transformers model."""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of `model`, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

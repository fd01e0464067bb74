"""Rotary positions of packed sequences.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.jit import jit_fuser
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Rope:
    """Rotary positions with Hugging Face's own frequencies (Su et al. 2021, arXiv 2104.09864, and its scalings).

    Megatron's are not used: they loop over the packed sequences in every layer, and support fewer scalings.

    Attributes:
        interleaved: the two numbers of a rotated pair are neighbours, (0, 1), (2, 3), ...; otherwise they come from the
            two halves of a head.
    """

    def __init__(self, hf_config: Any, rotary_dim: int, device: torch.device):
        rope, self.interleaved = hf_config.rope_parameters, bool(getattr(hf_config, "rope_interleave", False))
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
            self.inv_freq, self.scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            self.inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, None)
        self.inv_freq = self.inv_freq.to(device)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin `[num_tokens, 1, rotary_dim]` for positions `[num_tokens]`."""
        angles = torch.outer(positions.float(), self.inv_freq).repeat(1, 2)[:, None]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


@jit_fuser
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of each head, as many as `cos` has."""
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    left, right = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

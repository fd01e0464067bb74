"""DAPO's soft penalty for responses near the length limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def overlong_penalty(
    response_lengths: Sequence[int] | Tensor, *, max_response_len: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Compute factor * clip((max_response_len - buffer_len - |y|) / buffer_len, -1, 0) (arXiv:2503.14476, eq. 13).

    It is 0 up to the buffer, then falls linearly, and is -factor at the limit and beyond. Add it to the rewards.

    Args:
        response_lengths: `[num_samples]`, in tokens, with tool tokens, which also count for the limit.

    Returns:
        float64 `[num_samples]`.
    """
    lengths = torch.as_tensor(response_lengths).double()
    return factor * ((max_response_len - buffer_len - lengths) / buffer_len).clamp(-1, 0)

"""Linear attention and short convolutions of transformers over packed rows, with each sample computed by itself.

Transformers' layers call functions of their Python module, which expect one sample in a row. This module gives these
functions a second form for packed rows. `layout.run_packed` marks such rows by the argument `seq_idx`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from instep.training.delta_net import causal_conv, gated_delta_rule
from instep.training.packed_attention import rows
from instep.training.packing import SharedPrefixes

Segments = tuple[Tensor, SharedPrefixes]  # cu_seqlens of the stream, and which of its tokens are in the row


def pack_linear_attention(model: nn.Module) -> None:
    """Replace the functions that the layers of `model` call by their form for packed rows.

    Other layers with this convolution also have a scan, which would carry state from one segment into the next.
    """
    kinds = {type(module) for module in model.modules()}
    for name in {kind.__module__ for kind in kinds if kind.__name__.endswith(_LAYERS)}:
        functions = vars(sys.modules[name])
        for function, packed in _PACKED.items():
            own = functions.get(function)
            if own is not None and not isinstance(own, functools.partial):
                functions[function] = functools.partial(packed, own)


def _conv(
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Segments | None = None,
    **other: Any,
) -> Tensor:
    if seq_idx is None:
        return own(hidden_states, weight, bias, activation, **other)
    return _apart(
        lambda x, cu_seqlens: causal_conv(x, weight, bias, cu_seqlens, activation), seq_idx, hidden_states.mT
    ).mT


def _rule(
    own: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    seq_idx: Segments | None = None,
    **other: Any,
) -> tuple[Tensor, Tensor | None]:
    if seq_idx is None:
        return own(query, key, value, g=g, beta=beta, **other)
    return _apart(gated_delta_rule, seq_idx, query, key, value, g, beta), None


@torch.compiler.disable
def _apart(function: Callable[..., Tensor], segments: Segments, *given: Tensor) -> Tensor:
    """Run `function` on the samples of a row `[1, num_kept, ...]`: common prefixes belong to each of their samples."""
    cu_seqlens, shared = segments
    if len(shared.copies) == len(shared.kept):
        return function(*given, cu_seqlens)
    every = (rows(x[0], shared.copies)[None] for x in given)
    return function(*every, cu_seqlens).index_select(1, shared.kept)


_LAYERS = ("GatedDeltaNet", "ShortConv")
_PACKED: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": _conv, "torch_chunk_gated_delta_rule": _rule}

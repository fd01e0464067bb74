"""How a transformers model runs the samples of a stream: packed if possible, otherwise in padded rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from instep.models.attention import Unfit, check_plain
from instep.training.packed_attention import chunks_of, packed_attention
from instep.training.packing import SharedPrefixes, nothing_shared

# Errors of a device, its memory or the connection to another rank, not of the model. The CPU's allocator, gloo and old
# builds for GPUs raise plain RuntimeErrors.
_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
_SIGNS = ("DefaultCPUAllocator", "gloo/", "CUDA error", "NCCL error")


@dataclass(frozen=True)
class Layout:
    """One layout of samples.

    Attributes:
        attention: the name of the attention in transformers.
        packed: all samples are one row.
        batched: samples of similar length are rows of one pass, with padding on the right, which a causal model does
            not see; otherwise each sample has its own pass.
    """

    attention: str
    packed: bool = False
    batched: bool = False

    def __str__(self) -> str:
        return "packed" if self.packed else "padded" if self.batched else "one sample at a time"


PACKED = Layout("instep_packed", packed=True)
ALONE = Layout("eager")
LAYOUTS = (PACKED, Layout("instep_rows", batched=True), Layout("eager", batched=True), ALONE)  # the fastest first


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_cu_seqlens: Tensor | None = None,
    packed_max_seqlen: int = 0,
    packed_shared: SharedPrefixes | None = None,
    sliding_window: int | None = None,
    **other: Any,  # also dropout, which the engine does not use either
) -> tuple[Tensor, None]:
    """Run an attention for transformers: `[1, heads, num_tokens, head_dim]` -> `[1, num_tokens, heads, head_dim]`."""
    if packed_cu_seqlens is None:
        raise Unfit("its layers do not pass the packed segments to their attention")
    check_plain(other)
    if attention_mask is not None:
        if attention_mask.numel():
            raise Unfit("its attention uses its own mask")
        sliding_window = attention_mask.shape[0]  # see `_window`
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width < q.shape[-1]:  # latent attention
        v = F.pad(v, (0, q.shape[-1] - width))
    out = packed_attention(
        q,
        k,
        v,
        cu_seqlens=packed_cu_seqlens,
        max_seqlen=packed_max_seqlen,
        scale=scaling,
        shared=packed_shared,
        window=sliding_window or None,
    )
    return out[None, ..., :width], None


def _window(*, local_size: int | None = None, config: Any = None, use_vmap: bool = False, **_: Any) -> Tensor | None:
    """Return transformers' mask of a layer: None, or an empty tensor `[window, 0]`. Not all models give it twice.

    A compiled layer knows the shape of a tensor. To read a number from it, it would end its graph.
    """
    if use_vmap or (local_size is not None and local_size != getattr(config, "sliding_window", None)):
        raise Unfit("its attention uses its own mask")
    if local_size is None:
        return None
    return torch.empty(local_size, 0, dtype=torch.bool)  # FSDP2 casts floats


def _rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **other: Any
) -> tuple[Tensor, None]:
    """Run PyTorch's fused attention; refuse options that it would ignore."""
    check_plain(other)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **other)


ALL_ATTENTION_FUNCTIONS.register(PACKED.attention, _packed)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED.attention, _window)
ALL_ATTENTION_FUNCTIONS.register("instep_rows", _rows)
ALL_MASK_ATTENTION_FUNCTIONS.register("instep_rows", sdpa_mask)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Turn any error of a transformers model that cannot be built or run in a layout into `Unfit`."""
    try:
        yield
    except (ValueError, ImportError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, _OF_THE_MACHINE) or any(sign in str(error) for sign in _SIGNS):
            raise
        if PACKED.attention in str(error):
            raise Unfit("its attention cannot be replaced by packed attention") from error
        why = f"transformers cannot run it like this ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise Unfit(why) from error


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head; it returns hidden states."""
    body: nn.Module = model.base_model
    return model.model if body is model else body  # base_model of Llama-4 is the model itself


def run_packed(
    model: PreTrainedModel,
    tokens: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Return the hidden states of a stream in one pass, `[num_tokens, width]`; with `shared`, only of `shared.kept`."""
    if shared is None:  # layers are compiled for one kind of arguments
        shared = nothing_shared(cu_seqlens, max_seqlen, len(tokens))
    else:
        tokens, position_ids = tokens[shared.kept], position_ids[shared.kept]
    output = body_of(model)(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        use_cache=False,
        packed_cu_seqlens=cu_seqlens,
        packed_max_seqlen=max_seqlen,
        packed_shared=shared,
        seq_idx=(cu_seqlens, shared),  # of convolutions and linear attention
    )
    states: Tensor = output.last_hidden_state
    return states[0]


def run_rows(
    model: PreTrainedModel, tokens: Tensor, cu_seqlens: Tensor, batched: bool, num_passes: Callable[[int], int]
) -> Tensor:
    """Return the hidden states of a stream `[num_tokens, width]`, with samples as rows.

    Args:
        num_passes: returns the most passes of any rank, from this rank's number. Sharded layers are gathered in every
            pass, so ranks with fewer passes add idle ones.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    sizes = lengths.tolist()
    body = body_of(model)
    chunks = chunks_of(sizes) if batched else [[i] for i in range(len(sizes))]
    num_idle = num_passes(len(chunks)) - len(chunks)  # called before any pass: both are collective
    states, places = [], []
    for chunk in chunks:
        which = torch.tensor(chunk, device=tokens.device)
        at = torch.arange(max(sizes[i] for i in chunk), device=tokens.device)
        real = at < lengths[which, None]
        place = starts[which, None] + at.where(real, 0)
        states.append(body(input_ids=tokens[place], use_cache=False).last_hidden_state[real])
        places.append(place[real])
    stream = torch.cat(states)[torch.cat(places).argsort()]
    for _ in range(num_idle):
        idle = body(input_ids=tokens[None, :1], use_cache=False).last_hidden_state
        stream = stream + 0 * idle.sum()
    return stream

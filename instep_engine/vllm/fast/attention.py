"""On the GPU: attention of steps in which every request decodes one token, in engines with short contexts.

FlashAttention-3 computes tiles of 64 query rows, of which such a step fills only one for each query head. Here a small
program computes each request and key-value head, and several of them share a multiprocessor. Long contexts and few
requests stay with FlashAttention, which splits them over the multiprocessors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from instep_engine.vllm.fast import is_known

logger = init_logger("vllm.instep")
LONGEST = 2048  # of --max-model-len; a longer context would keep its program busy after all others have ended
PROGRAMS = 4  # for each multiprocessor, at least
WHOLE = (-1, -1)  # no window
EXTRAS = ("alibi_slopes", "s_aux", "mask_mod")  # s_aux: sinks


def install() -> None:
    """Use the kernel in vLLM 0.26's backend FLASH_ATTN. Once in each process that computes."""
    if not is_known() or not current_platform.is_cuda() or envs.VLLM_BATCH_INVARIANT:
        return
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends import flash_attn

    from instep_engine.vllm.fast.kernels import attend

    stock = flash_attn.flash_attn_varlen_func
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def flash_attn_varlen_func(*, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
        if not _fits(q, k, **more):
            return stock(q=q, k=k, v=v, **more)
        attend(more["out"], q, k, v, more["block_table"], more["seqused_k"], more["softmax_scale"])
        return more["out"]

    builder = flash_attn.FlashAttentionMetadataBuilder
    stock_init = builder.__init__

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if self.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            flash_attn.flash_attn_varlen_func = stock  # its graphs are captured as decoding, but also run prompts

    flash_attn.flash_attn_varlen_func, builder.__init__ = flash_attn_varlen_func, init
    logger.info("instep: a kernel for decode attention, if --max-model-len is at most %d", LONGEST)


def _fits(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    max_seqlen_q: int,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    **more: Any,
) -> bool:
    """Return whether the kernel computes this call. A CUDA graph keeps the decision of its capture."""
    if softcap or tuple(window_size or WHOLE) != WHOLE or any(more.get(name) is not None for name in EXTRAS):
        return False
    if max_seqlen_q != 1 or block_table is None or out is None or return_softmax_lse:
        return False
    short = block_table.shape[1] * k.shape[1] <= LONGEST
    enough = len(q) * k.shape[2] >= PROGRAMS * torch.cuda.get_device_properties(q.device).multi_processor_count
    usual = q.dtype == k.dtype == out.dtype and q.shape[2] in (64, 128)
    return short and enough and usual and len(q) == len(block_table)

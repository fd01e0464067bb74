"""Speculation on a CPU without Triton: vLLM 0.32 checks drafts at temperatures that were never written.

A Triton kernel repeats a request's temperature for each of its drafts. vLLM's replacement on a CPU writes into a copy,
unless the values are int64. So the tokens would not be samples of the model's distribution.
"""

from __future__ import annotations

import torch

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replaced: float,
    by: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write the value of each request, `[num_requests]`, for each of its tokens, `[num_tokens]`.

    Args:
        cu_num_tokens: where the tokens of each request end.
        replaced, by: a value that becomes another one.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replaced, by).repeat_interleave(counts))


def install() -> None:
    """Replace the kernel. Once in each process that computes; other versions and those with Triton keep theirs."""
    from vllm.triton_utils import HAS_TRITON

    try:
        from vllm.triton_utils.dispatcher import register_kernels
        from vllm.utils import cpu_triton_utils
    except ImportError:  # before 0.32
        return
    if not HAS_TRITON:
        cpu_triton_utils._expand_kernel_impl = expand
        register_kernels({KERNEL: expand})  # the platform may have registered its own already

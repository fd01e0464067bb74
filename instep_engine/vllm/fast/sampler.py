"""On the GPU: the choice of tokens, and only their log-probs if no request of a step needs more (`logprobs: 0`).

vLLM's sampler reads all logits three times with one program per row: for the maximum, for the sum, and for the token's
rank, which its server never shows. Here many programs read them once, and the rank is set to 0. `kernels.sample` needs
fewer logarithms and random numbers than vLLM. The distribution is the same, but a seed gives other tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON

from instep_engine.vllm.fast import is_known

logger = init_logger("vllm.instep")


def install() -> None:
    """Use the kernel in the sampler of vLLM 0.26's model runner V2. Once in each process that may sample."""
    if not is_known() or not HAS_TRITON:
        logger.info("instep: vLLM's own log-prob kernels, because this is not vLLM 0.26 with Triton")
        return
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    from instep_engine.vllm.fast.kernels import sample, token_log_probs

    stock = sampler.compute_topk_scores
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def compute_topk_scores(
        logits: torch.Tensor,
        num_logprobs: int,
        sampled_token_ids: torch.Tensor,
        cu_num_logits: list[int] | None = None,
        **more: Any,
    ) -> LogprobsTensors:
        if num_logprobs or cu_num_logits or more.get("max_per_req_token_ids") or more.get("logits_mode"):
            return stock(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)
        log_probs = token_log_probs(logits, sampled_token_ids)
        ranks = torch.zeros(len(log_probs), dtype=torch.int64)  # on the CPU: nothing to copy
        return LogprobsTensors(sampled_token_ids.unsqueeze(1), log_probs.unsqueeze(1), ranks)

    stock_sample = sampler.gumbel_sample

    @functools.wraps(stock_sample)
    def gumbel_sample(logits: torch.Tensor, *where: torch.Tensor, use_fp64: bool, **more: Any) -> torch.Tensor:
        return stock_sample(logits, *where, use_fp64=True, **more) if use_fp64 else sample(logits, *where)

    sampler.compute_topk_scores, sampler.gumbel_sample = compute_topk_scores, gumbel_sample
    logger.info("instep: own kernels to sample tokens and for their log-probs (model runner V2)")

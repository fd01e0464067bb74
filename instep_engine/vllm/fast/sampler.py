"""On the GPU: only the log-probs of the sampled tokens, if no request of a step needs more (`logprobs: 0`).

vLLM's sampler reads all logits three times with one program per row: for the maximum, for the sum, and for the token's
rank, which its server never shows. Here many programs read them once, and the rank is set to 0.
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

    from instep_engine.vllm.fast.kernels import token_log_probs

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

    sampler.compute_topk_scores = compute_topk_scores
    logger.info("instep: one kernel for the log-probs of sampled tokens (model runner V2)")

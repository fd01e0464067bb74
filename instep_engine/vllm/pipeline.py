"""A pipeline on a CPU: an eager vLLM 0.32 makes no buffers between two stages, so the second crashes at once.

vLLM makes them in the warm-up pass, which a CPU skips (`CPUModelRunner.warming_up_model`).
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Let a stage make its buffers when the first tensors come. Once in each process that computes."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    gather = getattr(CPUModelRunner, "sync_and_gather_intermediate_tensors", None)  # its name since 0.32
    if gather is None or hasattr(gather, "__wrapped__"):
        return

    @functools.wraps(gather)
    def gather_into_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    CPUModelRunner.sync_and_gather_intermediate_tensors = gather_into_buffers

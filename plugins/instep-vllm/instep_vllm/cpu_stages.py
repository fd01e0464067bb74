"""Pipeline stages on a CPU: `INSTEP_CPU_STAGES=1` in the environment of an engine with --pipeline-parallel-size there.

vLLM makes the buffers for what a stage gets from the one before it as it profiles memory or compiles. On a CPU it does
neither with --enforce-eager, and dies of the first token (`assert self.intermediate_tensors is not None`; 0.32).
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Let CPU workers make these buffers when they have loaded their model. Once in a process."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model
    if hasattr(load, "__wrapped_by_instep__"):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    load_model.__wrapped_by_instep__ = True  # type: ignore[attr-defined]
    CPUModelRunner.load_model = load_model

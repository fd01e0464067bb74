"""Faults of Megatron-Core 0.16.x that also bite on a GPU when Transformer Engine is not installed.

Two more are gone around rather than patched: `DistributedOptimizer.state_dict` / `load_state_dict` with torch's AdamW
(KeyError 'step'; one `step` tensor shared by all parameters), by the optimizer checkpoint of `checkpoint.py`; and the
norm that waits for the device once per tensor, by `optimizer_step` of `backend.py`.
"""

from __future__ import annotations

from instep.training.megatron.version import require_megatron


def apply() -> None:
    """Mend, once per process, what is needed. A no-op where upstream is whole."""
    require_megatron("upstream_fixes.te_general_gemm")
    from megatron.core.transformer.moe import moe_utils

    # router_gating_linear reads `te_general_gemm`, which is only imported where Transformer Engine is there: NameError.
    vars(moe_utils).setdefault("te_general_gemm", None)

"""Corrections of faults in Megatron-Core 0.16.x that also occur on a GPU where Transformer Engine is not installed.

Two more faults are avoided, not patched: `checkpoint.py` has its own optimizer checkpoint instead of
`DistributedOptimizer.state_dict` / `load_state_dict`, which fail with torch's AdamW (KeyError 'step'; one `step` tensor
shared by all parameters); `optimizer_step` of `backend.py` computes the norm without waiting for the device per tensor.
"""

from __future__ import annotations

import importlib.metadata

from instep.errors import ConfigError

SUPPORTED = "0.16."  # the versions that the corrections, and `cpu_platform.py`, were written for


def require_megatron() -> None:
    """Raise ConfigError if no Megatron-Core is installed, or another than 0.16.x."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "(none)"
    if not version.startswith(SUPPORTED):
        raise ConfigError(
            f"megatron-core {version} is installed, but instep's patches are written for {SUPPORTED}x",
            where="--train-backend megatron",
            remedy="pip install megatron-core==0.16.1, or use --train-backend hf",
        )


def apply() -> None:
    """Correct the faults in this process; no-op where they are corrected or Megatron-Core does not have them."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # router_gating_linear reads `te_general_gemm`, which is only imported where Transformer Engine is there: NameError.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # Without Transformer Engine it imports stand-ins of its classes, which are no types: isinstance() raises TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False

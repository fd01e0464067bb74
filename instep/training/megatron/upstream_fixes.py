"""Fixes for faults in Megatron-Core 0.16.x that also occur on a GPU without Transformer Engine.

Two more faults are avoided, not patched. `checkpoint.py` has its own optimizer checkpoint instead of
`DistributedOptimizer.state_dict` / `load_state_dict`, which fail with torch's AdamW (KeyError 'step'; one `step` tensor
shared by all parameters). `optimizer_step` of `backend.py` computes the norm without waiting for the device per tensor.
"""

from __future__ import annotations

import importlib.metadata

from instep.errors import ConfigError

SUPPORTED = "0.16."  # the versions that the fixes, and `cpu_platform.py`, were written for


def require_megatron() -> None:
    """Raise ConfigError if Megatron-Core is missing, or not 0.16.x."""
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
    """Fix the faults in this process; do nothing if they are fixed or Megatron-Core does not have them."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # router_gating_linear reads `te_general_gemm`, which is only imported with Transformer Engine: NameError.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # Without Transformer Engine it imports replacements of its classes that are not types: isinstance() raises
    # TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False

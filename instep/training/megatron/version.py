"""The range of Megatron-Core versions that the patches of this folder were written for."""

from __future__ import annotations

import importlib.metadata

from instep.errors import ConfigError

SUPPORTED = "0.16."


def require_megatron(patch: str) -> None:
    """Refuse a Megatron-Core that `patch` was not written for.

    Raises:
        ConfigError: none is installed, or another than 0.16.x.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "(none)"
    if not version.startswith(SUPPORTED):
        raise ConfigError(
            f"megatron-core {version} is installed, but {patch} is written for {SUPPORTED}x",
            where="--train-backend megatron",
            remedy="pip install megatron-core==0.16.1, or use --train-backend hf",
        )

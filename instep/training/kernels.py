"""Whether the Triton kernels of flash-linear-attention can be used. Imports no torch: also for plans."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re


@functools.cache
def has_flash_linear_attention(*, hopper: bool) -> bool:
    """Return whether version 0.6 or newer is installed and computes correctly.

    Its backward pass refuses Hopper with Triton 3.4 to 3.7.0, unless tilelang is installed, too.

    Args:
        hopper: whether the GPU is, or may be, of this generation.
    """
    if _version("fla-core") < (0, 6):
        return False
    return not (hopper and (3, 4) <= _version("triton") < (3, 7, 1)) or importlib.util.find_spec("tilelang") is not None


def _version(name: str) -> tuple[int, ...]:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", found)[:3])

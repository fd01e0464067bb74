"""`auto` values of --device and --precision, resolved where torch is."""

from __future__ import annotations

from typing import Any

import torch

from instep.errors import ConfigError


def resolve_device(args: Any, *, with_engines: bool) -> None:
    """Set `args.device` and `args.precision` to what they mean on this machine.

    Raises:
        ConfigError: there is no such device, or `--rollout-backend auto` beside a GPU.
    """
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this machine has no CUDA device", where="--device cuda", remedy="use --device cpu")
    if args.precision == "auto":
        args.precision = "bf16" if args.device == "cuda" else "fp32"
    if with_engines and args.device == "cuda" and args.rollout_backend == "auto":
        raise ConfigError(
            "this machine has a GPU, where the embedded engine is not chosen by itself",
            where="--rollout-backend auto",
            remedy="name it: --rollout-backend embedded (the vLLM backend comes later)",
        )

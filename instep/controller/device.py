"""`auto` values of --device, --precision and --num-threads, resolved where torch is."""

from __future__ import annotations

from typing import Any

import torch

from instep.engines.kind import resolve_backend
from instep.errors import ConfigError
from instep.processes import num_usable_cpus


def resolve_device(args: Any, *, with_engines: bool) -> None:
    """Set `args.device`, `args.precision` and `args.num_threads` to what they mean on this machine, which on a Ray
    cluster may be one without GPUs: there `--device cuda` is what its nodes have.

    Raises:
        ConfigError: there is no such device, or an engine is meant that is not installed.
    """
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and args.cluster == "local" and not torch.cuda.is_available():
        raise ConfigError("this machine has no CUDA device", where="--device cuda", remedy="use --device cpu")
    if args.precision == "auto":
        args.precision = "bf16" if args.device == "cuda" else "fp32"
    if args.cluster == "local" or args.deterministic_mode:  # else each host uses its own cores
        args.num_threads = args.num_threads or num_usable_cpus()
    if with_engines:
        resolve_backend(args)

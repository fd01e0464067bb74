"""Which engine `--rollout-backend` means here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from instep.engines.capabilities import EMBEDDED, Capabilities, of_vllm
from instep.engines.launch import Engine
from instep.errors import ConfigError


def resolve_backend(args: Any) -> None:
    """Set `args.rollout_backend` to what `auto` means on this machine; `args.device` is resolved.

    auto: vLLM beside a GPU, the embedded engine on a CPU (vLLM's start there takes half a minute, so it is asked for by
    name). The embedded engine is never chosen silently where there is a GPU.

    Raises:
        ConfigError: vLLM is meant, and not installed.
    """
    if args.rollout_backend == "auto":
        args.rollout_backend = "vllm" if args.device == "cuda" else "embedded"
        how = " (auto, beside a GPU)"
    else:
        how = ""
    if args.rollout_backend == "vllm" and not args.rollout_external_engine_addrs:  # those say themselves what they are
        for module, name in (("vllm", "vLLM"), ("instep_vllm", "its plugin instep-vllm")):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{name} is not installed here",
                    where=f"--rollout-backend vllm{how}",
                    remedy="make install-vllm (CPU); on a GPU host pip install vllm and plugins/instep-vllm; "
                    "or name --rollout-backend embedded",
                )
        capabilities_of(args).check_pause(args.pause_mode)
    if args.rollout_backend == "vllm" or args.rollout_external_engine_addrs:
        # vLLM shares a prompt anyway, and was slower so (0.26, H200, one run); what others take is not known.
        args.responses_per_request = 1


def capabilities_of(args: Any) -> Capabilities:
    """Of the engines that this run starts."""
    return of_vllm(importlib.metadata.version("vllm")) if args.rollout_backend == "vllm" else EMBEDDED


def external_engines(args: Any) -> list[Engine]:
    """The engines of `--rollout-external-engine-addrs`; what they are is asked for when they are ready."""
    addresses = args.rollout_external_engine_addrs or ()
    return [Engine(f"engine {i}", f"http://{address}") for i, address in enumerate(addresses)]

"""The kind of engine that `--rollout-backend` means, and what a run knows about it before its engines start."""

from __future__ import annotations

import contextlib

from instep.arguments.settings import Settings
from instep.engines.kind import AUTO, EngineKind, all_kinds, kind_of
from instep.errors import ConfigError


def named_kind(args: Settings) -> EngineKind | None:
    """Return the kind of `--rollout-backend`; None for an `auto` that is not resolved yet."""
    return None if args.rollout_backend == AUTO else kind_of(args.rollout_backend)


def planned_kind(args: Settings) -> EngineKind:
    """Return the kind of `--rollout-backend`. An unresolved `auto` is the kind that it means on the device."""
    return named_kind(args) or _auto_kind("cpu" if args.device == "cpu" else "cuda")


def _auto_kind(device: str) -> EngineKind:
    return next(kind for kind in all_kinds() if kind.auto_device == device)


def resolve_backend(args: Settings) -> str:
    """Return the name of the kind that `--rollout-backend` means on this host; `args.device` is resolved.

    `auto` means vLLM beside a GPU and the embedded engine on a CPU, where vLLM takes half a minute to start. With a GPU
    the embedded engine is never chosen silently.

    Raises:
        ConfigError: the kind is not installed, or does not support the `--pause-mode`.
    """
    kind = named_kind(args)
    flags = kind.meant_by(args) if kind is not None else ""
    how = f", which {flags} means" if flags else ""
    if kind is None:
        kind, how = _auto_kind(args.device), f" ({AUTO}, on {args.device})"
    if not args.rollout_external_engine_addrs:  # external engines report what they are
        kind.check_installed(f"--rollout-backend {kind.name}{how}")
        kind.capabilities.check_pause(args.pause_mode, arrays=answers_in_arrays(args))
    return kind.name


def tells_versions(args: Settings) -> bool:
    """Return whether the run's own engines surely say which weights made each token, as `--pause-mode keep` needs.

    For `auto`, all installed kinds that it may mean count. An engine that says it only in arrays gets JSON requests for
    stop strings, and perhaps from a user's generate function.
    """
    named = named_kind(args)
    arrays = answers_in_arrays(args) and not args.rollout_stop and args.custom_generate_function_path is None
    found = []
    for kind in [named] if named else [kind for kind in all_kinds() if kind.auto_device]:
        with contextlib.suppress(ConfigError):  # this kind is not installed; its start reports that
            kind.check_installed("--rollout-backend")
            found.append(kind.capabilities.tells_versions(arrays=arrays))
    return all(found)


def answers_in_arrays(args: Settings) -> bool:
    """Return whether all engines of a run surely answer in arrays, from instep's own scheduler."""
    others = args.rollout_external_engine_addrs or args.vllm_config or "scheduler_cls" in args.vllm_overrides
    return not (args.no_fast_log_probs or others)

"""Resolve the value `auto` of --device, --precision and --num-threads on the machine of the run."""

from __future__ import annotations

from contextlib import suppress

import torch

from instep.arguments.args import Args
from instep.arguments.cluster import cpu_cores, own_gpus, same_gpus, single_copy
from instep.arguments.lora import quantized_base
from instep.engines.backend_choice import named_kind, planned_kind, resolve_backend
from instep.engines.engine import external_engines
from instep.errors import ConfigError, EngineError
from instep.system.processes import num_usable_cpus

FREED = {"cuda"}  # devices whose memory trainer and engines hand to each other


def device_here() -> str:
    """Return what `--device auto` means on this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_on_machine(args: Args, *, with_engines: bool) -> Args:
    """Return the arguments with `auto` resolved for this machine.

    With `--cluster ray` this machine may have no GPU: `--device cuda` then refers to the nodes of the cluster.

    Raises:
        ConfigError: this machine has no CUDA device or too few cores for the ranks, or the engine's kind is not
            installed.
    """
    precision, num_threads = args.precision, args.num_threads
    device = device_here() if args.device == "auto" else args.device
    if device == "cuda" and args.cluster == "local" and not torch.cuda.is_available():
        raise ConfigError("this machine has no CUDA device", where="--device cuda", remedy="use --device cpu")
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    if args.cluster == "local" or args.deterministic_mode:  # else each host uses its own cores
        num_threads = num_threads or num_usable_cpus()
    asked = args.offload or args.device == "cpu"  # else offloading is only a default
    args = args.replace(device=device, precision=precision, num_threads=num_threads)
    for rule in (cpu_cores, own_gpus, same_gpus, single_copy):
        for problem in rule(args, set()):
            if problem.refused and args.command != "serve":  # serve has no trainer
                raise ConfigError(problem.what, where=problem.where, remedy=problem.remedy)
    if device not in FREED and (args.offload_train or args.offload_rollout):
        said = ["offload has nothing to free on a CPU"] if asked else []
        args = args.replace(offload_train=False, offload_rollout=False, notes=[*args.notes, *said])
    if with_engines:
        args = args.replace(rollout_backend=_other_kind_there(args) or resolve_backend(args))
        for problem in quantized_base(args, set()):
            raise ConfigError(problem.what, where=problem.where, remedy=problem.remedy)
    return args


def _other_kind_there(args: Args) -> str | None:
    """Return the kind of the external engines, if `auto` would start the wrong router for them; else None."""
    if named_kind(args) is None:
        with suppress(EngineError):  # it does not answer yet: the fleet checks it later
            for engine in external_engines(args)[:1]:
                engine.identify()
                return None if engine.kind.router is planned_kind(args).router else engine.kind.name
    return None

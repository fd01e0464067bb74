"""Choose the imports of a run's fork servers."""

from __future__ import annotations

import os

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import Settings
from instep.engines.backend_choice import planned_kind
from instep.system import fork_server
from instep.system.gpus import gpus_here
from instep.system.processes import OPENMP_ENV


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork servers of this process, if there are any, import the modules of workers and engines.

    `args.device` may be unresolved. With GPUs of different models vLLM might keep the capability of another one.
    """
    if fork_server.current is None or (args.cluster == "ray" and args.device != "cpu"):
        return
    modules, kind = ["instep.training.worker"] if trainer else [], planned_kind(args)
    if trainer and args.train_backend == "hf":  # Megatron's replacements for CUDA would also reach the engines
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV, fork_server.NO_CUDA_CHECK: "1"})
    has_engines = algorithm_of(args).has_rewards and not (args.debug_train_only or args.rollout_external_engine_addrs)
    if fork_server.of_engines is None or args.device == "cpu" or not has_engines:
        return
    engine_modules, env = kind.imports(args)
    if engine_modules and len({gpu.name for gpu in gpus_here()}) == 1:
        program = f"instep.engines.{kind.name}_main"
        fork_server.of_engines.preload(engine_modules, {**os.environ, **env}, program)

"""Choose the imports of a run's fork servers."""

from __future__ import annotations

import os

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import Settings
from instep.engines.backend_choice import planned_kind
from instep.engines.vllm_process import vllm_env
from instep.system import fork_server
from instep.system.gpus import gpus_here
from instep.system.processes import OPENMP_ENV


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork servers of this process, if any, import modules of workers and engines; the device may be `auto`."""
    if fork_server.current is None or (args.cluster == "ray" and args.device != "cpu"):
        return
    modules = ["instep.training.worker"] if trainer else []
    if trainer and args.train_backend == "hf":  # Megatron's replacements for CUDA would also reach the engines
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    by_nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else an import that looks for GPUs initializes CUDA
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV, **by_nvml})
    if (server := fork_server.of_engines) is None or args.debug_train_only or not algorithm_of(args).has_rewards:
        return
    if planned_kind(args).name == "vllm" and not args.rollout_external_engine_addrs:
        names = [f"vllm.entrypoints.cli.{name}" for name in ("main", "benchmark.main", "launch", "serve")]
        if len({gpu.name for gpu in gpus_here()}) == 1:  # imports may keep the capability of the first GPU
            server.preload(names, {**os.environ, **vllm_env(args, 1)}, "instep.engines.vllm_main")

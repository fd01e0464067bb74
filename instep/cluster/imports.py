"""Choose the imports of a run's fork server."""

from __future__ import annotations

import os

from instep.arguments.settings import Settings
from instep.system import fork_server
from instep.system.processes import OPENMP_ENV


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork server of this process, if there is one, import the modules of workers and engines.

    Only with `--device cpu`: on a GPU host these imports are not tested, and might initialize CUDA.
    """
    if fork_server.current is None or args.device != "cpu":
        return
    modules = ["instep.training.worker"] if trainer else []
    if trainer and args.train_backend == "hf":  # Megatron's replacements for CUDA would also reach the engines
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV})

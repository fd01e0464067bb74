"""Tells the fork server of a run what its processes import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from instep.system import fork_server
from instep.system.processes import OPENMP_ENV

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork server of this process, if there is one, import what workers and engines need.

    Only with `--device cpu`: these imports have not been tested on a GPU host, where they might initialize CUDA.
    """
    if fork_server.current is None or args.device != "cpu":
        return
    modules = ["instep.training.worker"] if trainer else []
    if trainer and args.train_backend == "hf":  # Megatron's stand-ins for CUDA would reach the engines, too
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV})

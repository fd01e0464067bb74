"""What the processes of a run import, for its fork server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from instep import fork_server
from instep.processes import OPENMP_ENV

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork server of this process, if there is one, import what workers and engines need.

    Only on a CPU: whether the libraries leave GPUs alone while they are imported was not tried on one.
    """
    if fork_server.current is None or args.device != "cpu":
        return
    modules = ["instep.training.worker"] if trainer else []
    if trainer and args.train_backend == "hf":  # Megatron's stand-ins for CUDA would be seen by engines, too
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV})

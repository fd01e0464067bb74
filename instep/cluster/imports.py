"""Tells the fork server of a run what its processes import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from instep import fork_server
from instep.processes import OPENMP_ENV

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def preload(args: Settings, *, trainer: bool = True) -> None:
    """Let the fork server of this process, if there is one, import what workers and engines need.

    This is for `--device cpu` only. Nobody has tested yet that these imports leave a GPU alone.
    """
    if fork_server.current is None or args.device != "cpu":
        return
    modules = ["instep.training.worker"] if trainer else []
    if trainer and args.train_backend == "hf":  # Megatron's stand-ins for CUDA would reach the engines, too
        modules.append("instep.training.hf.backend")
    if args.rollout_backend == "embedded":
        modules.append("instep.engines.embedded.scheduler")
    fork_server.current.preload(modules, {**os.environ, **OPENMP_ENV})

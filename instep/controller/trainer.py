"""Starting the trainer: every role's process group, model, first weights and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.arguments.roles import args_of_role
from instep.cluster.launch import Cluster
from instep.controller.role import RoleTrainer
from instep.controller.weights import load_critic, load_policy
from instep.training import lr_schedule


def start_trainer(
    args: Any, cluster: Cluster, checkpoint: Path | None, num_rollout: int, tell: Callable[[str], None]
) -> list[RoleTrainer]:
    """The actor, and the critic if there is one, with their weights.

    Args:
        checkpoint: that `--load` holds.
        tell: gets what the user may want to know.
    """
    groups = [group for group in (cluster.workers, cluster.critic) if group.num_ranks]
    setups = [
        group.start("setup", timeout=args.worker_start_timeout, per_rank=cluster.setup_requests[group.role])
        for group in groups
    ]
    layouts = [wait() for wait in setups]
    load_policy(args, cluster.workers, checkpoint)
    if cluster.critic.num_ranks:
        tell(load_critic(args, cluster.critic, checkpoint))
    roles = []
    for group, layout in zip(groups, layouts, strict=True):
        own = args_of_role(args, group.role)
        rollouts = num_rollout - (args.num_critic_only_steps if group.role == "actor" else 0)
        roles.append(RoleTrainer(own, group, layout, lr_schedule.from_args(own, _num_steps(args, rollouts))))
    return roles


def _num_steps(args: Any, num_rollouts: int) -> int:
    """Optimizer steps of so many rollouts, at least 1."""
    if num_rollouts <= 0:
        return 1
    return max(1, num_rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)

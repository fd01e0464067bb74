"""What the controller starts a run's processes with: the same interface on one host and on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from instep.arguments.roles import args_of_role
from instep.cluster.local import WorkerGroup, worker_env
from instep.cluster.placement import num_critic_gpus
from instep.engines.launch import Engine, start_embedded
from instep.processes import Process, stop_all


class Cluster(Protocol):
    """The workers and engines of a run.

    Attributes:
        workers, critic: the ranks of the actor and of PPO's critic; after `start`. No rank where there is no such role.
        engines: not ready yet when `start` returns.
        setup_requests: by role, of each rank the arguments of `Worker.setup`.
    """

    workers: WorkerGroup
    critic: WorkerGroup
    engines: list[Engine]
    setup_requests: dict[str, list[tuple[Any, ...]]]

    def start(self) -> None:
        """Start all processes."""

    def close(self) -> None:
        """End all processes, also after a `start` that has failed half-way."""


def make_cluster(
    args: Any, *, log_dir: Path, scratch: Path, with_engines: bool, status: Callable[[str], None]
) -> Cluster:
    """The cluster that `--cluster` names; nothing is started.

    Args:
        scratch: a folder on this host.
        status: tells the user what is being waited for.
    """
    if args.cluster == "ray":
        from instep.cluster.ray import RayCluster

        return RayCluster(args, log_dir=log_dir.absolute(), with_engines=with_engines, status=status)
    return LocalCluster(args, log_dir=log_dir, scratch=scratch, with_engines=with_engines)


class LocalCluster:
    """All processes on this host."""

    def __init__(self, args: Any, *, log_dir: Path, scratch: Path, with_engines: bool):
        self._args, self._log_dir, self._with_engines = args, log_dir, with_engines
        self.workers, self.critic = (WorkerGroup(role, 0, log_dir) for role in ("actor", "critic"))
        self.engines: list[Engine] = []
        sizes = {} if args.debug_rollout_only else {"actor": args.world_size, "critic": num_critic_gpus(args)}
        self._threads_per_rank = max(1, args.num_threads // max(1, sum(sizes.values())))
        self.setup_requests: dict[str, list[tuple[Any, ...]]] = {}
        first_gpu = 0
        for role, size in sizes.items():
            rendezvous, role_args = str(scratch / f"rendezvous-{role}"), args_of_role(args, role)
            self.setup_requests[role] = [
                (role_args, rank, size, rendezvous, self._threads_per_rank, role, first_gpu + rank)
                for rank in range(size)
            ]
            first_gpu += size

    def start(self) -> None:
        args, logs = self._args, self._log_dir
        env = {**worker_env(args, self._threads_per_rank), "GLOO_SOCKET_IFNAME": "lo"}
        num_ranks = {role: len(requests) for role, requests in self.setup_requests.items()}
        self.workers = WorkerGroup("actor", num_ranks.get("actor", 0), logs, env, args.heartbeat_timeout)
        self.critic = WorkerGroup("critic", num_ranks.get("critic", 0), logs, env, args.heartbeat_timeout)
        if self._with_engines:
            self.engines = [start_embedded(args, 0, num_threads=args.num_threads, log_dir=logs, port=args.engine_port)]

    def close(self) -> None:
        engines: list[Process] = [engine.process for engine in self.engines if engine.process is not None]
        stop_all([*self.workers.processes, *self.critic.processes, *engines], grace=2.0)

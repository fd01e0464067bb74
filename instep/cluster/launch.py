"""Start and end the processes of a run, with one interface for one host and for a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from instep.arguments.args import Args
from instep.arguments.colocation import can_take_turns
from instep.cluster.base import Cluster
from instep.cluster.engine_start import start_engine
from instep.cluster.local import WorkerGroup, worker_env
from instep.cluster.placement import num_critic_gpus
from instep.engines.engine import Engine, external_engines
from instep.engines.kind import kind_of
from instep.engines.spec import LONGEST_START, EngineSpec
from instep.errors import ConfigError
from instep.system.processes import num_usable_cpus
from instep.weights.way import SINGLE_COPY
from instep_engine import MEMORY_VARIABLE, ROOM_VARIABLE
from instep_engine.place import SYNC


def make_cluster(
    args: Args,
    *,
    log_dir: Path,
    scratch: Path,
    with_engines: bool,
    status: Callable[[str], None],
    memory: Path | None = None,
) -> Cluster:
    """Return the cluster of `--cluster`; nothing is started yet.

    Args:
        scratch: a temporary folder on this host.
        status: reports to the user what the start waits for.
        memory: a folder in the shared memory of this host, where engines share their weights (single-copy).
    """
    if args.cluster == "ray":
        from instep.cluster.ray import RayCluster

        return RayCluster(args, log_dir=log_dir.absolute(), with_engines=with_engines, status=status)
    return LocalCluster(args, log_dir=log_dir, scratch=scratch, memory=memory, with_engines=with_engines)


class LocalCluster(Cluster):
    """All processes on this host."""

    def __init__(self, args: Args, *, log_dir: Path, scratch: Path, with_engines: bool, memory: Path | None = None):
        super().__init__(args, log_dir=log_dir, with_engines=with_engines)
        self._scratch, self._memory = scratch, memory
        sizes = {} if args.debug_rollout_only else {"actor": args.world_size, "critic": num_critic_gpus(args)}
        self._num_threads = args.num_threads or num_usable_cpus()
        self._threads_per_rank = threads = max(1, self._num_threads // max(1, sum(sizes.values())))
        gpu = 0
        for role, size in sizes.items():
            shared = self._role_args(role), str(scratch / f"rendezvous-{role}")
            self.setup_requests[role] = [
                (shared[0], rank, size, shared[1], threads, role, gpu + rank) for rank in range(size)
            ]
            gpu += size

    def start(self) -> None:
        args = self._args
        env = {**worker_env(args, self._threads_per_rank), "GLOO_SOCKET_IFNAME": "lo"}
        self.workers, self.critic = (
            WorkerGroup(role, len(self.setup_requests.get(role, ())), self._log_dir, env, args.heartbeat_timeout)
            for role in ("actor", "critic")
        )
        if self._with_engines:
            self.engines = external_engines(args)
            stay = can_take_turns(args) and not args.offload_rollout
            if (args.offload_train or stay) and not self.engines:
                self.room = self._scratch / "room" if kind_of(args.rollout_backend).waits_for_room else None
            self._start_engines()

    def _start_engine(self, spec: EngineSpec, port: int | None = None) -> Engine:
        args = self._args
        # Leave one core to the controller, HTTP and rewards, which feed the engines and take their responses.
        cores = self._num_threads - (self._num_threads > 2)
        threads = max(1, cores // len(self._specs))
        env = self._devices(spec) if args.device == "cuda" and kind_of(args.rollout_backend).own_gpus else {}
        if args.weight_sync == SINGLE_COPY and spec.update_weights:
            assert self._memory is not None, "a run whose engines share their weights has such a folder"
            folder = self._memory / f"{SYNC}{spec.index}"
            folder.mkdir(mode=0o700, exist_ok=True)
            env[MEMORY_VARIABLE] = str(folder)
        if self.room is not None:
            env[ROOM_VARIABLE] = f"{LONGEST_START}:{self.room}"
        return start_engine(args, spec, num_threads=threads, log_dir=self._log_dir, port=port, env=env)

    def _devices(self, spec: EngineSpec) -> dict[str, str]:
        """Return the environment that shows an engine exactly its planned GPUs."""
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            here = visible.split(",")
        else:
            import torch

            here = [str(i) for i in range(torch.cuda.device_count())]
        wanted = [slot.gpu for slot in spec.slots]
        if max(wanted) >= len(here):
            raise ConfigError(
                f"{spec.name} is planned on GPU {max(wanted)}, but this host has {len(here)}",
                where="--rollout-num-gpus and --actor-num-gpus-per-node",
                remedy="use fewer, or let trainer and engines share GPUs with --colocate (see `instep plan`)",
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(here[gpu] for gpu in wanted)}

"""The cluster starts and ends the processes of a run; it has one interface on one host and on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instep.arguments.args import Args
from instep.arguments.roles import args_of_role
from instep.arguments.rollout import context_of_model
from instep.cluster.engine_plan import elsewhere, plan_engines
from instep.cluster.engine_start import start_engine
from instep.cluster.joint import JointProcess
from instep.cluster.local import WorkerGroup, worker_env
from instep.cluster.placement import num_critic_gpus
from instep.engines.engine import Engine, external_engines
from instep.engines.kind import kind_of
from instep.engines.spec import LONGEST_START, EngineSpec
from instep.errors import ConfigError, EngineError
from instep.system.processes import Process, num_usable_cpus, stop_all
from instep.weights.way import SINGLE_COPY
from instep_engine import MEMORY_VARIABLE, ROOM_VARIABLE
from instep_engine.place import SYNC

END_SECONDS = 60.0  # until an engine that was killed has ended, perhaps on another host


class Cluster:
    """The workers and engines of a run.

    Attributes:
        workers, critic: after `start` the ranks of the actor and of PPO's critic; empty groups without such a role.
        engines: the engines, which are not ready yet when `start` returns.
        one_host: after `start` whether this process, rank 0 of the actor and all engines that get its weights share a
            host.
        room: after `start` the file without which no engine touches a GPU, made when the trainer has left them; None:
            engines do not wait.
        setup_requests: after `start` for each role the arguments of `Worker.setup`, rank by rank.
    """

    def __init__(self, args: Args, *, log_dir: Path, with_engines: bool):
        self._args, self._log_dir, self._with_engines = args, log_dir, with_engines
        self._specs = plan_engines(args) if with_engines else []
        self.workers, self.critic = (WorkerGroup(role, 0, log_dir) for role in ("actor", "critic"))
        self.engines: list[Engine] = []
        self.one_host = not elsewhere(args)
        self.room: Path | None = None
        self.setup_requests: dict[str, list[tuple[Any, ...]]] = {}

    def start(self) -> None:
        """Start all processes."""
        raise NotImplementedError

    def _start_engine(self, spec: EngineSpec, port: int | None = None) -> Engine:
        """Start an engine; `port` is that of one that is restarted."""
        raise NotImplementedError

    def _role_args(self, role: str) -> Args:
        return args_of_role(self._args, role).replace(vllm_max_model_len=context_of_model(self._args))

    def _start_engines(self) -> None:
        for spec in self._specs:
            self.engines.append(self._start_engine(spec))

    def restart_engine(self, index: int, checkpoint: Path | None = None) -> None:
        """End what is left of an engine and start it again at its address; this replaces its `process`.

        Args:
            checkpoint: what it serves then, under the same name; None: what the plan says.
        """
        engine = self.engines[index]
        assert engine.process is not None
        engine.stop()
        parts: list[Process] = engine.process.parts if isinstance(engine.process, JointProcess) else [engine.process]
        if not all(part.died_within(END_SECONDS) for part in parts):
            raise EngineError(
                f"{engine.name} does not end",
                where=engine.process.describe(),
                remedy="end it on its host: its process is named above",
            )
        engine.process = self._start_engine(self._specs[index].on(checkpoint), urlsplit(engine.url).port).process

    def close(self) -> None:
        """End all processes, even after a `start` that failed half-way."""
        engines = [engine.process for engine in self.engines if engine.process is not None]
        stop_all([*self.workers.processes, *self.critic.processes, *engines], grace=2.0)


def make_cluster(
    args: Args,
    *,
    log_dir: Path,
    scratch: Path,
    with_engines: bool,
    status: Callable[[str], None],
    memory: Path | None = None,
) -> Cluster:
    """The cluster that `--cluster` names; nothing is started yet.

    Args:
        scratch: a temporary folder on this host.
        status: tells the user what the start waits for.
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
            if args.offload_train and args.offload_rollout and not self.engines:
                self.room = self._scratch / "room" if kind_of(args.rollout_backend).waits_for_room else None
            self._start_engines()

    def _start_engine(self, spec: EngineSpec, port: int | None = None) -> Engine:
        args = self._args
        # One core is left to the controller, HTTP and rewards, which feed the engines and take their responses.
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
        """The environment in which an engine sees exactly the GPUs that the plan gives it."""
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

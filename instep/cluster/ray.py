"""The `ray` cluster: the same supervised processes as on the `local` cluster, on the nodes of a Ray cluster.

Each node of the plan has one bundle of the placement group and one actor (`ray_host.Host`). Controller and workers
exchange the same messages as on the local cluster; `ray_remote.py` describes their path.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instep.arguments.args import Args
from instep.cluster.base import Cluster, JointProcess
from instep.cluster.engine_start import RESTART_SECONDS, engine_at, log_name
from instep.cluster.local import worker_env
from instep.cluster.placement import Plan, make_plan
from instep.cluster.ray_host import Host
from instep.cluster.ray_remote import POLL_SECONDS, HostHandle, RayWorkerGroup, RemoteProcess, why
from instep.engines import keys
from instep.engines.engine import Engine, external_engines
from instep.engines.kind import kind_of
from instep.engines.spec import Addresses, EngineSpec, Slot
from instep.errors import ConfigError, InstepError
from instep.system.ports import LOOPBACK
from instep.system.processes import SupervisedProcess, num_usable_cpus, stop_all
from instep.system.scratch import Scratch
from instep.weights.way import ON_ONE_HOST

STATUS_SECONDS = 15.0
OBJECT_STORE_BYTES = 2**30  # for a Ray that instep starts: messages pass through it, and do not stay
# Prefixes of the controller's environment variables that all processes get.
FORWARDED = ("PYTHONPATH", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "NVTE_")


class RayCluster(Cluster):
    """A cluster with all processes on the nodes of a Ray cluster, which this process joins or starts."""

    def __init__(self, args: Args, *, log_dir: Path, with_engines: bool, status: Callable[[str], None]):
        super().__init__(args.public(), log_dir=log_dir, with_engines=with_engines)
        self._status, self._plan = status, make_plan(args)
        self._env: dict[str, str] = {}  # of all processes
        self._ray = Ray(args.ray_address)
        self._hosts: list[HostHandle] = []

    def start(self) -> None:
        args, plan = self._args, self._plan
        self._ray.connect(num_cpus=plan.num_gpus, status=self._status)
        self._hosts = self._ray.reserve(
            plan, gpus=args.device == "cuda", timeout=args.worker_start_timeout, status=self._status
        )
        self._check_hosts()
        self._env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) and not k.endswith("_TOKEN")}
        self.workers = self._start_ranks("actor", plan.actor)
        self.critic = self._start_ranks("critic", plan.critic)
        self.engines = external_engines(args) if self._with_engines else []
        self._start_engines()

    def _start_engine(self, spec: EngineSpec, port: int | None = None) -> Engine:
        """Start one process of the engine on each of its nodes."""
        args = self._args
        kind = kind_of(args.rollout_backend)
        kind.check_start(args, spec)
        hosts = [self._hosts[slots[0].node] for slots in spec.nodes]
        head = hosts[0]
        address = LOOPBACK if self._ray.is_here(head) else head.info.address
        wanted = (port or spec.port, address, RESTART_SECONDS if port else 0.0, spec.num_side_channel_ports)
        chosen, *others = head.ask("choose_ports", *wanted)
        at = Addresses(address, chosen, head.info.address, *others)
        parts: list[RemoteProcess] = []
        try:
            for rank, (host, slots) in enumerate(zip(hosts, spec.nodes, strict=True)):
                name = f"{spec.name} node {rank}" if rank else spec.name
                log, threads = self._log_dir / log_name(spec, rank), args.num_threads or host.info.num_cpus
                env = {**self._env, **kind.environment(args, spec, at, host.info.address, threads)}
                env |= keys.server_environment(args) | self._devices([slot.gpu for slot in slots], slots[0].node)
                words = kind.command(args, spec, at, rank)
                parts.append(host.start("start_engine", name, log, words, env, args.heartbeat_timeout))
        except InstepError:
            stop_all(parts)
            raise
        return engine_at(args, spec, at, JointProcess(parts) if len(parts) > 1 else parts[0], head.info.user)

    def _start_ranks(self, role: str, slots: Sequence[Slot]) -> RayWorkerGroup:
        args, trainer = self._args, (*self._plan.actor, *self._plan.critic)
        processes, requests, role_args = [], [], self._role_args(role)
        rendezvous, fd = self._hosts[slots[0].node].ask("open_rendezvous") if slots else ("", -1)
        for rank, slot in enumerate(slots):
            host, log = self._hosts[slot.node], self._log_dir / f"{role}-rank{rank}.log"
            ranks_there = sum(other.node == slot.node for other in trainer)
            threads = max(1, (args.num_threads or host.info.num_cpus) // ranks_there)
            env = {**self._env, **worker_env(args, threads), **self._devices([slot.gpu], slot.node)}
            given = (env, args.heartbeat_timeout, [] if rank else [fd])
            processes.append(host.start("start_worker", f"{role} rank {rank}", log, *given))
            url = rendezvous if rank else f"{rendezvous}?fd={fd}"
            requests.append((role_args, rank, len(slots), url, threads, role))
        self.setup_requests[role] = requests
        return RayWorkerGroup(role, processes)

    def _devices(self, gpus: Sequence[int], node: int) -> dict[str, str]:
        """Return the environment that shows these GPUs of the plan; their order is that of Ray's ids on the node."""
        if self._args.device != "cuda":
            return {}
        ids, planned = self._hosts[node].info.gpus, self._plan.nodes[node]
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids[planned.index(gpu)] for gpu in gpus)}

    def _check_hosts(self) -> None:
        """Raise ConfigError if the run folder is not shared, or if `--weight-sync` does not reach every engine."""
        args, here = self._args, self._ray.is_here
        if self._with_engines and self._plan.actor:
            fed = [spec for spec in self._specs if spec.update_weights]
            needed = {self._plan.actor[0].node, *(slot.node for spec in fed for slot in spec.slots)}
            for host in (self._hosts[node] for node in sorted(needed)):
                self.one_host = self.one_host and here(host)
                if not here(host) and args.weight_sync in ON_ONE_HOST:
                    raise ConfigError(
                        f"with this way of a sync, rank 0 of the trainer, the engines and this process must share "
                        f"memory, but node {host.info.address} is on another host than this process",
                        where=f"--weight-sync {args.weight_sync} with --cluster ray",
                        remedy="use --weight-sync disk (through --run-dir, on a folder that all hosts share), or start "
                        "from a node that has the CPUs and GPUs",
                    )
        others = [host for host in self._hosts if not here(host)]
        if not others:
            return
        probe = self._log_dir.parent / f".shared-{secrets.token_hex(4)}"
        probe.touch()
        try:
            for host in others:
                if not host.ask("sees", str(probe)):
                    raise ConfigError(
                        f"{self._log_dir.parent} is not the same folder on node {host.info.address}",
                        where="--run-dir",
                        remedy="put the run folder, checkpoints and data on a file system that all hosts share",
                    )
        finally:
            probe.unlink()

    def close(self) -> None:
        super().close()
        for host in self._hosts:
            host.close()
        self._ray.close()


class Ray:
    """The connection to a Ray cluster, or a Ray of this run alone, which ends with the run.

    Args:
        address: `--ray-address`.
    """

    def __init__(self, address: str):
        self.address = os.environ.get("RAY_ADDRESS") or "local" if address == "auto" else address
        self._scratch: Scratch | None = None
        self._reaper: SupervisedProcess | None = None
        self._group: Any = None
        self._node_id = ""
        self._connected = False

    def connect(self, *, num_cpus: int, status: Callable[[str], None]) -> None:
        """Join Ray, or start one with at least `num_cpus` slots; a slot counts one process and is not bound to a core.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster at the address.
        """
        handler = signal.getsignal(signal.SIGTERM)
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late request must not start a new Ray
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address == "local":
            options |= self._own(num_cpus)
        import ray  # after the environment: Ray reads it now

        if ray.is_initialized():
            what = "this process has joined a Ray already"
            raise ConfigError(what, where="--cluster ray", remedy="begin the run when the other one with Ray has ended")

        try:
            if self.address not in ("local", "auto"):  # Ray itself needs minutes to notice a missing server
                host, _, port = self.address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(self.address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"no Ray at '{self.address}': {why(error)}",
                where="--ray-address (or RAY_ADDRESS)",
                remedy="give the host:port that `ray start --head` printed (no ray://), and run on a node that has "
                "joined, with the RAY_AUTH_TOKEN of the cluster, if it has one",
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own handler
        self._connected = True
        self._node_id = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        where = "a Ray for this run only" if self.address == "local" else f"Ray at {self.address}"
        status(f"{where}: {len(nodes)} node(s), {_total(nodes, 'CPU'):g} CPUs, {_total(nodes, 'GPU'):g} GPUs")

    def _own(self, num_cpus: int) -> dict[str, Any]:
        """Return the options of a Ray that only processes on this host with its token can reach."""
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read at import: Ray listens on loopback only
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray opens its folder to all users, so it gets one inside ours. Names are short: socket paths have a limit.
        root = os.environ.get("RAY_TMPDIR")
        self._scratch = Scratch("instep-ray-", Path(root) if root else None)
        folder = self._scratch.path
        command = [sys.executable, "-m", "instep.cluster.ray_reaper", str(folder)]
        self._reaper = SupervisedProcess("reaper", command, folder / "reaper.log", outlives=True)
        return {
            "num_cpus": max(num_cpus, num_usable_cpus()),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
            # No idle workers (one per core); actors, and so ranks and engines, at normal priority (Ray: nice 15).
            "_system_config": {"prestart_worker_first_driver": False, "worker_niceness": 0},
            "_temp_dir": str(folder / "r"),
        }

    def reserve(self, plan: Plan, *, gpus: bool, timeout: float, status: Callable[[str], None]) -> list[HostHandle]:
        """Wait for the plan's resources, then start an actor on each node. This node is the first, if it has room.

        Raises:
            ConfigError: the cluster does not have the resources within `timeout` seconds.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [{"CPU": n, "GPU": n} if gpus else {"CPU": n} for n in map(len, plan.nodes)]
        here = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == self._node_id)
        pins: list[dict[str, str]] = [{} for _ in bundles]
        if all(here.get(kind, 0) >= amount for kind, amount in bundles[0].items()):
            pins[0] = {"ray.io/node-id": self._node_id}
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
        self._group = placement_group(bundles, strategy=strategy, bundle_label_selector=pins)
        self._wait(plan, bundles, timeout, status)
        actor = ray.remote(Host)
        actors = [
            actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=bundle["CPU"] + 8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote(os.getcwd())
            for index, bundle in enumerate(bundles)
        ]
        return [HostHandle(a, timeout) for a in actors]

    def _wait(self, plan: Plan, bundles: list[dict[str, int]], timeout: float, status: Callable[[str], None]) -> None:
        import ray

        kind = "GPU" if "GPU" in bundles[0] else "CPU"
        wanted = f"{len(bundles)} node(s) with {', '.join(str(b[kind]) for b in bundles)} {kind}s"
        deadline = time.monotonic() + timeout
        said = time.monotonic()
        while not self._group.wait(POLL_SECONDS):
            nodes = [node for node in ray.nodes() if node["Alive"]]
            has = f"{len(nodes)} node(s) with {', '.join(f'{_total([n], kind):g}' for n in nodes)} {kind}s"
            too_few = self.address == "local" and _total(nodes, kind) < plan.num_gpus  # this does not change
            if too_few or time.monotonic() > deadline:
                free = ray.available_resources().get(kind, 0)
                raise ConfigError(
                    f"the plan needs {wanted}, but Ray has {has}, {free:g} of them free"
                    + ("" if too_few else f", after {timeout:.0f} s"),
                    where="--cluster ray",
                    remedy="see `instep plan` with the same flags; use fewer, let trainer and engines share with "
                    "--colocate, wait for more nodes with a larger --worker-start-timeout, or set --num-gpus-per-node",
                )
            if time.monotonic() - said > STATUS_SECONDS:
                said = time.monotonic()
                status(f"waiting for {wanted}; Ray has {has}")

    def is_here(self, host: HostHandle) -> bool:
        """Return whether this process runs on the host's node."""
        return host.info.node_id == self._node_id

    def close(self) -> None:
        if self._connected:
            import ray
            from ray.util.placement_group import remove_placement_group

            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()
        if self._scratch is not None and self._reaper is not None:
            self._reaper.stop()
            self._scratch.remove()


def _total(nodes: Sequence[dict[str, Any]], kind: str) -> float:
    return sum(node["Resources"].get(kind, 0) for node in nodes)

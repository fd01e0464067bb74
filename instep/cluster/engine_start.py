"""Start the engines and routers of a plan on this host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from instep.arguments.settings import EngineSettings, Settings
from instep.cluster.engine_plan import RouterSpec
from instep.engines import keys
from instep.engines.engine import Engine
from instep.engines.gate import Gate
from instep.engines.kind import kind_of
from instep.engines.router import Router
from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import ServerRole
from instep.system.ports import LOOPBACK, choose_port, free_port, free_ports
from instep.system.processes import Process, SupervisedProcess
from instep_engine.guard import KEY_VARIABLE

RESTART_SECONDS = 5.0  # for the port of a dead engine to become free


def log_name(spec: EngineSpec, node_rank: int = 0) -> str:
    return f"engine-{spec.index}{f'-node{node_rank}' if node_rank else ''}.log"


def engine_at(args: EngineSettings, spec: EngineSpec, at: Addresses, process: Process, user: int) -> Engine:
    """Return the engine of `spec`: `process` runs it as `user`, and it answers at `at`."""
    url = f"http://{at.host}:{at.port}"
    keys.know(url, keys.run_key(), user=user if at.host == LOOPBACK else None)
    return Engine(
        spec.name,
        url,
        process,
        kind_of(args.rollout_backend),
        model=spec.model,
        role=spec.role,
        update_weights=spec.update_weights,
        num_replicas=spec.parallel.data,
        sleeps=spec.sleeps,
        bootstrap_port=int(at.side_channel_port) or None,
    )


def start_engine(
    args: Settings,
    spec: EngineSpec,
    *,
    num_threads: int,
    log_dir: Path,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Engine:
    """Start an engine on this host, on loopback; it is not ready yet on return.

    Args:
        port: the port of a restarted engine; default: the port of the plan, or a free one.

    Raises:
        ConfigError: the port is taken, or the engine could not serve.
    """
    kind = kind_of(args.rollout_backend)
    kind.check_start(args, spec)
    chosen = choose_port(port or spec.port, LOOPBACK, RESTART_SECONDS if port else 0.0)
    at = Addresses(LOOPBACK, chosen, LOOPBACK, side_channel_port=free_ports(spec.num_side_channel_ports))
    process = SupervisedProcess(
        spec.name,
        [sys.executable, *kind.command(args, spec, at)],
        log_dir / log_name(spec),
        {**kind.environment(args, spec, at, LOOPBACK, num_threads), **keys.server_environment(args), **(env or {})},
        heartbeat=args.heartbeat_timeout,
    )
    return engine_at(args, spec, at, process, os.geteuid())


def start_router(
    args: Settings, spec: RouterSpec, engines: Sequence[Engine], log_dir: Path, name: str = "router"
) -> Router:
    """Return the router of `--vllm-router-ip/-port`, or start one here on loopback; it is not ready yet.

    Args:
        engines: the engines that the router may have.

    Raises:
        ConfigError: its program is not installed.
    """
    if spec.external is not None:
        url = f"http://{spec.external[0]}:{spec.external[1]}"
        keys.know(url, keys.client_key(args) if spec.engines else keys.given_key(args))
        return spec.kind(url, engines=engines)
    key = keys.router_key(args, ours=bool(spec.engines))
    port, prometheus_port = free_port(), free_port()
    roles: dict[str, ServerRole] = {engine.url: engine.role for engine in engines}
    log = log_dir / f"{file_name(name)}.log"

    def start(urls: Sequence[str]) -> SupervisedProcess:
        words = spec.arguments(LOOPBACK, port, prometheus_port, [(roles[url], url) for url in urls])
        return SupervisedProcess(name, [sys.executable, *spec.kind.command(words)], log, spec.kind.environment(key))

    url = f"http://{LOOPBACK}:{port}"
    keys.know(url, key, user=os.geteuid())
    kind = spec.kind.disaggregated() if spec.disaggregated else spec.kind
    return kind(url, start, engines)


def start_gate(args: EngineSettings, spec: RouterSpec, to: str, log_dir: Path, name: str = "gate") -> Gate:
    """Start a gate in front of the router or engine `to`, at `spec.port` or a free port; it is not ready yet."""
    port = spec.port or free_port()
    command = [sys.executable, "-m", "instep.engines.gate_main", "--host", LOOPBACK, "--port", str(port), "--to", to]
    command += ["--backend", args.rollout_backend]
    if (user := keys.user_at(to)) is not None:
        command += ["--user", str(user)]
    env = keys.server_environment(args) | {KEY_VARIABLE: keys.key_of(to)}
    process = SupervisedProcess(name, command, log_dir / f"{file_name(name)}.log", env)
    url = f"http://{LOOPBACK}:{port}"
    keys.know(url, "" if args.no_api_key else keys.client_key(args), user=os.geteuid())
    return Gate(url, process)


def file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)

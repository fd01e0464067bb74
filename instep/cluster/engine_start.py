"""Starting the engines and routers of a plan: one process per node of an engine."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.cluster.engine_plan import Addresses, EngineSpec, RouterSpec
from instep.engines.launch import Engine, embedded_command, embedded_env
from instep.engines.router import DisaggregatedRouter, Router, router_command
from instep.engines.start import capabilities_of
from instep.engines.topology import Role
from instep.engines.vllm import check_cpu, vllm_command, vllm_env
from instep.errors import ConfigError
from instep.ports import choose_port, free_port, free_ports
from instep.processes import Process, SupervisedProcess

LOOPBACK = "127.0.0.1"
RESTART_SECONDS = 5.0  # for the port of an engine that has died to be free again


def check_engine(args: Any, spec: EngineSpec) -> None:
    """Raise ConfigError for one that would start, and die of its first request."""
    if args.rollout_backend == "vllm" and args.device == "cpu":
        check_cpu(Path(spec.path))
    if spec.kv_connector == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "prefill engines hand the KV cache to decode engines by NIXL, which is not installed here",
            where=f"{spec.name} ({spec.role})",
            remedy="pip install nixl, or choose another connector with --vllm-kv-transfer-config",
        )


def engine_command(args: Any, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
    """What follows the interpreter, for the process on the engine's `node_rank`-th node."""
    if args.rollout_backend == "vllm":
        return vllm_command(spec.arguments(at, node_rank))
    return embedded_command(args, spec.path, spec.flags, at.host, at.port)


def engine_env(args: Any, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int) -> dict[str, str]:
    """What is added to the environment of the process on `node_host`, but for its GPUs."""
    if args.rollout_backend == "vllm":
        return {**vllm_env(args, num_threads), **spec.environment(at, node_host)}
    return embedded_env(args, num_threads)


def log_name(spec: EngineSpec, node_rank: int = 0) -> str:
    return f"engine-{spec.index}{f'-node{node_rank}' if node_rank else ''}.log"


def engine_at(args: Any, spec: EngineSpec, at: Addresses, process: Process) -> Engine:
    """The engine whose first node is reached at `at`."""
    url = f"http://{at.host}:{at.port}"
    served: dict[str, Any] = {"model": spec.model, "role": spec.role, "update_weights": spec.update_weights}
    served["num_replicas"] = spec.parallel.data
    return Engine(spec.name, url, process, capabilities_of(args), **served)


def start_engine(
    args: Any,
    spec: EngineSpec,
    *,
    num_threads: int,
    log_dir: Path,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Engine:
    """Start an engine on this host, reached on loopback; it is not ready yet when this returns.

    Args:
        port: where it has been before; default: that of the plan, or a free one.

    Raises:
        ConfigError: the wanted port is taken, or it could not serve.
    """
    check_engine(args, spec)
    chosen = choose_port(port or spec.port, LOOPBACK, RESTART_SECONDS if port else 0.0)
    at = Addresses(LOOPBACK, chosen, LOOPBACK, side_channel_port=free_ports(spec.num_side_channel_ports))
    process = SupervisedProcess(
        spec.name,
        [sys.executable, *engine_command(args, spec, at)],
        log_dir / log_name(spec),
        {**engine_env(args, spec, at, LOOPBACK, num_threads), **(env or {})},
        heartbeat=args.heartbeat_timeout,
    )
    return engine_at(args, spec, at, process)


def start_router(spec: RouterSpec, engines: Sequence[Engine], log_dir: Path, name: str = "router") -> Router:
    """The router of `--vllm-router-ip/-port`, or a vllm-router of our own on loopback; not ready yet.

    Args:
        engines: those that may stand behind it.

    Raises:
        ConfigError: vllm-router is not installed.
    """
    if spec.external is not None:
        return Router(f"http://{spec.external[0]}:{spec.external[1]}")
    port, prometheus_port = spec.port or free_port(), free_port()
    roles: dict[str, Role] = {engine.url: engine.role for engine in engines}
    log = log_dir / (re.sub(r"[^\w.-]", "_", name) + ".log")

    def start(urls: Sequence[str]) -> SupervisedProcess:
        words = spec.arguments(LOOPBACK, port, prometheus_port, [(roles[url], url) for url in urls])
        return SupervisedProcess(name, [sys.executable, *router_command(words)], log, {"RUST_LOG": "warn"})

    url = f"http://{LOOPBACK}:{port}"
    return DisaggregatedRouter(url, start) if spec.disaggregated else Router(url, start)

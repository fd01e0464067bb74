"""Which engines and routers a run starts, where, and with which flags: a pure function of the arguments.

`EngineSpec.arguments` is the command line of `vllm serve` once hosts and ports are known; nothing here starts anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from instep.cluster.placement import Slot, make_plan
from instep.engines.flags import router_arguments
from instep.engines.topology import (
    Parallel,
    Role,
    group_words,
    parallel,
    policy_model,
    served_models,
)

# The router's name of a connector by which prefill engines hand the KV cache to decode engines.
_CONNECTORS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake", "MoRIIOConnector": "moriio"}


@dataclass(frozen=True)
class Addresses:
    """Where an engine is reached, known when it starts.

    Attributes:
        host, port: of its HTTP server, on its first node.
        master_host: its first node, as the other nodes of the engine reach it.
        master_port: where its ranks meet, if it has several nodes.
        rpc_port: where its data-parallel replicas meet, if they are on several nodes.
    """

    host: str
    port: int
    master_host: str = ""
    master_port: int = 0
    rpc_port: int = 0


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the plan.

    Attributes:
        index: among all engines of the run, in their order; its name is `engine <index>`.
        model: the name of the model that it serves; path: the Hugging Face folder.
        role: regular, prefill or decode.
        slots: its GPUs, node after node.
        parallel: how they share the work; their product is `num_gpus`.
        flags: of `vllm serve`, without those of addresses and nodes.
        port: of its HTTP server where `--engine-port` says it; None: a free one.
        update_weights: whether it gets the trainer's weights.
    """

    index: int
    model: str
    path: str
    role: Role
    slots: tuple[Slot, ...]
    parallel: Parallel
    flags: tuple[str, ...] = ()
    port: int | None = None
    update_weights: bool = True

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def num_gpus(self) -> int:
        return len(self.slots)

    @property
    def nodes(self) -> tuple[tuple[Slot, ...], ...]:
        """Its slots by node; one process of `vllm serve` runs on each."""
        nodes = sorted({slot.node for slot in self.slots})
        return tuple(tuple(slot for slot in self.slots if slot.node == node) for node in nodes)

    @property
    def kv_connector(self) -> str:
        """How the router is told that a prefill or decode engine hands its KV cache over; "" for a regular one."""
        if self.role == "regular":
            return ""
        for flag, value in zip(self.flags, self.flags[1:], strict=False):
            if flag == "--kv-transfer-config":
                return _CONNECTORS.get(json.loads(value).get("kv_connector", ""), "")
            if flag == "--kv-transfer-config.kv_connector":
                return _CONNECTORS.get(value, "")
        return ""

    @property
    def num_side_channel_ports(self) -> int:
        """Ports in a row, from VLLM_NIXL_SIDE_CHANNEL_PORT on, that this engine takes on each node; one per replica."""
        return self.parallel.data if self.kv_connector == "nixl" else 0

    def arguments(self, at: Addresses, node_rank: int = 0) -> list[str]:
        """What follows `vllm serve` for the process on the engine's `node_rank`-th node."""
        num_nodes = len(self.nodes)
        words = [self.path, *self.flags, "--tensor-parallel-size", str(self.parallel.tensor)]
        if num_nodes > 1:
            words += ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
            words += ["--master-addr", at.master_host, "--master-port", str(at.master_port)]
            if self.parallel.data > 1:
                words += ["--data-parallel-rpc-port", str(at.rpc_port)]
        if node_rank:
            return [*words, "--headless"]
        return [*words, "--host", at.host, "--port", str(at.port)]


@dataclass(frozen=True)
class RouterSpec:
    """The router in front of a model's engines.

    Attributes:
        engines: the indices of its engines.
        disaggregated: prefill and decode have engines of their own.
        external: (ip, port) of one that somebody else runs (`--vllm-router-ip`).
        default: whether rollouts use it unless they name a model.
    """

    model: str
    engines: tuple[int, ...]
    flags: tuple[str, ...] = ()
    disaggregated: bool = False
    kv_connector: str = ""
    external: tuple[str, int] | None = None
    default: bool = False
    roles: dict[int, Role] = field(default_factory=dict)

    def arguments(self, host: str, port: int, prometheus_port: int, urls: dict[int, str]) -> list[str]:
        """What follows `vllm-router`. `urls`: of each engine, by index."""
        words = ["--host", host, "--port", str(port), "--prometheus-port", str(prometheus_port), *self.flags]
        if not self.disaggregated:
            return [*words, "--worker-urls", *(urls[i] for i in self.engines)]
        words += ["--vllm-pd-disaggregation"]
        words += ["--kv-connector", self.kv_connector] if self.kv_connector else []
        for index in self.engines:
            words += ["--" + self.roles[index], urls[index]]
        return words


def plan_engines(args: Any) -> list[EngineSpec]:
    """The engines of a run, in the order of their groups.

    Args:
        args: parsed arguments; those that `make_plan` needs, `hf_checkpoint`, `engine_port`, and the `--vllm-*` flags.

    Raises:
        ConfigError: GPUs, nodes and parallel sizes do not fit together.
    """
    slots = iter(make_plan(args).engines)
    if args.command == "sft" or args.debug_train_only:
        return []
    out: list[EngineSpec] = []
    for model in served_models(args):
        for group in model.groups:
            if not group.num_engines:
                continue
            words = group_words(args, group)
            layout = parallel(words, group.num_gpus_per_engine, model.where)
            flags = tuple(word for group_of_words in words.values() for word in group_of_words)
            for _ in range(group.num_engines):
                port = None if args.engine_port is None else args.engine_port + len(out)
                path = model.path or str(args.hf_checkpoint)
                spec = EngineSpec(
                    len(out), model.name, path, group.role, next(slots), layout, flags, port, model.update_weights
                )
                out.append(spec)
    return out


def plan_routers(args: Any, engines: list[EngineSpec]) -> list[RouterSpec]:
    """One router per model, in front of its `engines`."""
    if not engines:
        return []
    models = served_models(args)
    default = policy_model(models)
    out = []
    for model in models:
        mine = [engine for engine in engines if engine.model == model.name]
        out.append(
            RouterSpec(
                model.name,
                tuple(engine.index for engine in mine),
                tuple(router_arguments(args)),
                model.disaggregated,
                next((engine.kv_connector for engine in mine if engine.kv_connector), ""),
                (args.vllm_router_ip, args.vllm_router_port) if args.vllm_router_ip is not None else None,
                model is default,
                {engine.index: engine.role for engine in mine},
            )
        )
    return out

"""Which engines and routers a run starts, where, and with which flags: a pure function of the arguments.

`EngineSpec.arguments` is the command line of `vllm serve` once hosts and ports are known; nothing here starts anything
(`engine_start.py` does).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.algorithms.catalog import OFFLINE
from instep.cluster.placement import Slot, make_plan, node_size
from instep.engines.router import router_words
from instep.engines.topology import (
    Parallel,
    Role,
    ServerGroup,
    group_words,
    model_path,
    parallel,
    policy_model,
    served_models,
)
from instep.engines.vllm import SEVERAL, launch_words
from instep.errors import ConfigError

_CONNECTOR = re.compile(r'"kv_connector"\s*:\s*"(\w+)"')
# The router's name of a connector by which prefill engines hand the KV cache to decode engines.
_CONNECTORS = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "MoRIIOConnector": "moriio",
}


@dataclass(frozen=True)
class Addresses:
    """Where an engine is reached, known when it starts.

    Attributes:
        host, port: of its HTTP server, on its first node.
        master_host: its first node, as the other nodes of the engine reach it.
        master_port: where its ranks meet, if it has several nodes.
        rpc_port: where its data-parallel replicas meet, if they are on several nodes.
        side_channel_port: the first of `num_side_channel_ports` on each of its nodes.
    """

    host: str
    port: int | str
    master_host: str = ""
    master_port: int | str = 0
    rpc_port: int | str = 0
    side_channel_port: int | str = 0


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the plan.

    Attributes:
        index: among all engines of the run, in their order; its name is `engine <index>`.
        model: the name of the model that it serves; path: the Hugging Face folder.
        role: regular, prefill or decode.
        slots: its GPUs, node after node.
        parallel: how they share the work; their product is `num_gpus`.
        words: what the command line and overrides tell `vllm serve`, by field; own: what instep adds to them. Without
            TP and what has to do with addresses and nodes.
        port: of its HTTP server where `--engine-port` says it, or `--port`, if it has no router; None: a free one.
        update_weights: whether it gets the trainer's weights.
    """

    index: int
    model: str
    path: str
    role: Role
    slots: tuple[Slot, ...]
    parallel: Parallel
    words: Mapping[str, list[str]] = field(default_factory=dict)
    own: Mapping[str, list[str]] = field(default_factory=dict)
    port: int | None = None
    update_weights: bool = True

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def num_gpus(self) -> int:
        return len(self.slots)

    @property
    def flags(self) -> tuple[str, ...]:
        """`words` and `own` as they are written."""
        return tuple(word for words in (*self.words.values(), *self.own.values()) for word in words)

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt + response, where a number says it."""
        text = self.words.get("max_model_len", [""])[-1]
        return int(text) if text.isdigit() else None

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
            if flag == "--kv-transfer-config.kv_connector":
                return _CONNECTORS.get(value, "")
            if flag == "--kv-transfer-config" and (found := _CONNECTOR.search(value)):
                return _CONNECTORS.get(found[1], "")
        return ""

    @property
    def num_side_channel_ports(self) -> int:
        """Ports in a row that it takes on each node for handing the KV cache over: one per data-parallel replica."""
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
        if self.parallel.data > 1:  # else one per replica, and an abort would reach the requests of one of them
            words += ["--api-server-count", "1"]
        return [*words, "--host", at.host, "--port", str(at.port)]

    def environment(self, at: Addresses, node_host: str) -> dict[str, str]:
        """What the environment of the process on `node_host` must hold for these flags."""
        env = {"VLLM_HOST_IP": node_host} if len(self.nodes) > 1 else {}
        if self.num_side_channel_ports:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = node_host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(at.side_channel_port)
        return env


@dataclass(frozen=True)
class RouterSpec:
    """The router in front of a model's engines.

    Attributes:
        engines: the indices of its engines; none where they run already.
        disaggregated: prefill and decode have engines of their own.
        external: (ip, port) of one that somebody else runs (`--vllm-router-ip`).
        default: whether rollouts use it unless they name a model.
        port: where it listens (`--port` of `instep serve`); None: anywhere.
    """

    model: str
    engines: tuple[int, ...]
    flags: tuple[str, ...] = ()
    disaggregated: bool = False
    kv_connector: str = ""
    external: tuple[str, int] | None = None
    default: bool = False
    port: int | None = None

    def arguments(
        self, host: str, port: int | str, prometheus_port: int | str, members: Iterable[tuple[Role, str]] = ()
    ) -> list[str]:
        """What follows `vllm-router`.

        Args:
            members: role and URL of each engine that serves, of prefill and decode engines; others join while it runs.
        """
        words = ["--host", host, "--port", str(port), "--prometheus-port", str(prometheus_port), *self.flags]
        if self.disaggregated:
            words += ["--vllm-pd-disaggregation"]
            words += ["--kv-connector", self.kv_connector] if self.kv_connector else []
            words += [word for role, url in members for word in ("--" + role, url)]
        return words


def plan_engines(args: Any) -> list[EngineSpec]:
    """The engines of a run, in the order of their groups.

    Args:
        args: parsed arguments; those that `make_plan` needs, `hf_checkpoint`, `engine_port`, and the `--vllm-*` flags.

    Raises:
        ConfigError: GPUs, nodes and parallel sizes do not fit together.
    """
    slots = iter(make_plan(args).engines)
    if args.command in OFFLINE or args.debug_train_only:
        return []
    out: list[EngineSpec] = []
    for place, model in enumerate(served_models(args)):
        by_itself = not has_router(args, sum(group.num_engines for group in model.groups))
        for group in model.groups:
            if not group.num_engines:
                continue
            words = group_words(args, group)
            layout = parallel(words, group.num_gpus_per_engine, model.where)
            _check_nodes(layout, group.num_gpus_per_engine, node_size(args), model.where)
            own = _own_words(args, words, group, model.update_weights)
            for _ in range(group.num_engines):
                port = None if args.engine_port is None else args.engine_port + len(out)
                if by_itself and args.port is not None:
                    port = args.port + place
                out.append(
                    EngineSpec(
                        len(out),
                        model.name,
                        model_path(args, model),
                        group.role,
                        next(slots),
                        layout,
                        words,
                        own,
                        port,
                        model.update_weights,
                    )
                )
            if group.role != "regular" and not out[-1].kv_connector:
                raise ConfigError(
                    f"kv_transfer_config names no connector that the router knows: {', '.join(_CONNECTORS)}",
                    where=f"{model.where}, {group.role} engines",
                    remedy="leave it out for NixlConnector",
                )
    return out


def _own_words(
    args: Any, words: Mapping[str, list[str]], group: ServerGroup, update_weights: bool
) -> dict[str, list[str]]:
    if args.rollout_backend == "embedded":
        return {}
    own = launch_words(args, num_gpus=group.num_gpus_per_engine, role=group.role, update_weights=update_weights)
    return {name: given for name, given in own.items() if name not in words or name in SEVERAL}


def _check_nodes(layout: Parallel, num_gpus: int, per_node: int, where: str) -> None:
    """An engine of several nodes: each replica within a node, or over whole ones."""
    replica = num_gpus // layout.data
    if num_gpus > per_node and per_node % replica and replica % per_node:
        raise ConfigError(
            f"its {layout.data} data-parallel replicas of {replica} GPUs do not lie evenly on nodes of {per_node}",
            where=where,
            remedy="choose a data parallel size so that a replica fills a part of a node, or whole nodes",
        )


def longest(args: Any) -> int | None:
    """Most tokens of prompt + response that every engine with the trainer's weights takes; None: the model's."""
    found = [engine.max_model_len for engine in plan_engines(args) if engine.update_weights]
    found.append(args.vllm_max_model_len)
    return min((length for length in found if length is not None), default=None)


def has_router(args: Any, num_engines: int) -> bool:
    """Whether a model with so many engines does: an embedded one that is alone answers by itself."""
    return num_engines > 1 or args.vllm_router_ip is not None or args.rollout_backend == "vllm"


def plan_routers(args: Any, engines: list[EngineSpec]) -> list[RouterSpec]:
    """One router per model, in front of its `engines`, or of those that run already."""
    if not engines and not args.rollout_external_engine_addrs:
        return []
    models = served_models(args)
    default = policy_model(models)
    ports = [None] * len(models) if args.port is None else range(args.port, args.port + len(models))
    out = []
    for model, port in zip(models, ports, strict=True):
        mine = [engine for engine in engines if engine.model == model.name]
        out.append(
            RouterSpec(
                model.name,
                tuple(engine.index for engine in mine),
                tuple(router_words(args)),
                model.disaggregated,
                next((engine.kv_connector for engine in mine if engine.kv_connector), ""),
                (args.vllm_router_ip, args.vllm_router_port) if args.vllm_router_ip is not None else None,
                model is default,
                port,
            )
        )
    return out


def describe_engines(args: Any) -> Iterator[str]:
    """The lines that `instep plan` prints about engines that are vLLM's: what they serve, and their command lines.

    Capitals stand for addresses, which are known when a run starts.
    """
    engines = plan_engines(args)
    for router in plan_routers(args, engines):
        default = ", which rollouts use by default" if router.default and len(served_models(args)) > 1 else ""
        yield f"model {router.model}{default}"
        mine = [engines[i] for i in router.engines]
        for alike in _alike(mine):
            yield "  " + _summary(alike)
            one = alike[0]
            at = Addresses("HOST", one.port or "PORT", "MASTER", "MASTER_PORT", "RPC_PORT", "SIDE_CHANNEL_PORT")
            for rank in range(len(one.nodes)):
                name, host = (f"node {rank} of it: ", f"HOST_{rank}") if len(one.nodes) > 1 else ("", "HOST")
                env = "".join(f"{k}={v} " for k, v in one.environment(at, host).items())
                yield f"    {name}{env}vllm serve {shlex.join(one.arguments(at, rank))}"
        if router.external is not None:
            yield f"  router: {router.external[0]}:{router.external[1]}, which is not instep's"
        else:
            members = [(engine.role, f"URL_{engine.index}") for engine in mine]
            yield f"  router: vllm-router {shlex.join(router.arguments('HOST', 'PORT', 'PORT', members))}"


def _alike(engines: list[EngineSpec]) -> list[list[EngineSpec]]:
    """Engines that follow each other and differ only in place and port."""
    out: list[list[EngineSpec]] = []
    for engine in engines:
        if out and (out[-1][-1].role, out[-1][-1].flags, out[-1][-1].parallel) == (
            engine.role,
            engine.flags,
            engine.parallel,
        ):
            out[-1].append(engine)
        else:
            out.append([engine])
    return out


def _summary(alike: list[EngineSpec]) -> str:
    first, last = alike[0], alike[-1]
    numbers = f"engine {first.index}" if first is last else f"engines {first.index}-{last.index}"
    gpus = f"{first.num_gpus} GPU{'s' if first.num_gpus > 1 else ''}" + (" each" if len(alike) > 1 else "")
    ports = "" if first.port is None else f", port {first.port}" + (f"-{last.port}" if last is not first else "")
    weights = "gets the trainer's weights" if first.update_weights else "keeps its weights"
    return f"{numbers}: {first.role}, {gpus} ({first.parallel}){ports}, {weights}"

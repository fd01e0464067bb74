"""The engines and routers of a run, their places and flags: a pure function of the arguments.

`engine_start.py` starts them.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from instep.algorithms.catalog import OFFLINE
from instep.arguments.settings import EngineSettings, Settings
from instep.cluster.placement import make_plan, node_size
from instep.engines.backend_choice import planned_kind
from instep.engines.dialect import VLLM, Parallel, dialect_of
from instep.engines.router import Router
from instep.engines.spec import KV_CONNECTORS, Addresses, EngineSpec
from instep.engines.topology import ServerRole, group_words, model_path, policy_model, served_models
from instep.errors import ConfigError
from instep.weights.way import Sharing, way_meant


@dataclass(frozen=True)
class RouterSpec:
    """The router in front of a model's engines.

    Attributes:
        engines: the indices of its engines; empty for external engines.
        disaggregated: whether prefill and decode run on separate engines.
        external: (ip, port) of an external router (`--vllm-router-ip`).
        default: whether rollouts use it unless they name a model.
        port: the port of the model for clients of `instep serve` (`--port`); None: a free port.
        kind: its program, by the kind of the engines.
    """

    model: str
    engines: tuple[int, ...]
    flags: tuple[str, ...] = ()
    disaggregated: bool = False
    kv_connector: str = ""
    external: tuple[str, int] | None = None
    default: bool = False
    port: int | None = None
    kind: type[Router] = Router

    def arguments(
        self, host: str, port: int | str, prometheus_port: int | str, members: Iterable[tuple[ServerRole, str]] = ()
    ) -> list[str]:
        """Return the arguments of the router's program.

        Args:
            members: role and URL of each prefill and decode engine that serves; regular engines join later.
        """
        words = ["--host", host, "--port", str(port), "--prometheus-port", str(prometheus_port), *self.flags]
        if self.disaggregated:
            words += self.kind.disaggregated_words(self.kv_connector, members)
        return words


def plan_engines(args: Settings) -> list[EngineSpec]:
    """Return the engines of a run, in the order of their groups.

    Raises:
        ConfigError: GPUs, nodes and parallel sizes do not fit together.
    """
    plan = make_plan(args)
    slots, trainer = iter(plan.engines), {*plan.actor, *plan.critic}
    if args.command in OFFLINE or args.debug_train_only:
        return []
    out: list[EngineSpec] = []
    for model in served_models(args):
        for group in model.groups:
            if group.num_engines < 1:  # no engine; a rule reports a negative number
                continue
            words = group_words(args, group)
            layout = dialect_of(args).parallel(words, group.num_gpus_per_engine, model.where)
            _check_nodes(layout, group.num_gpus_per_engine, node_size(args), model.where)
            own = planned_kind(args).own_words(args, group, words, model.update_weights)
            for mine in itertools.islice(slots, group.num_engines):
                port = None if args.engine_port is None else args.engine_port + len(out)
                out.append(
                    EngineSpec(
                        len(out),
                        model.name,
                        model_path(args, model),
                        group.role,
                        mine,
                        layout,
                        words,
                        own,
                        port,
                        model.update_weights,
                        sleeps=args.offload_rollout and model.update_weights and not trainer.isdisjoint(mine),
                    )
                )
            if dialect_of(args) is VLLM and group.role != "regular" and not out[-1].kv_connector:
                raise ConfigError(
                    f"kv_transfer_config names no connector that the router knows: {', '.join(KV_CONNECTORS)}",
                    where=f"{model.where}, {group.role} engines",
                    remedy="use one of these connectors, or remove the setting for NixlConnector",
                )
    return out


def _check_nodes(layout: Parallel, num_gpus: int, per_node: int, where: str) -> None:
    """Raise ConfigError unless each replica of a multi-node engine fits in a node or fills whole nodes."""
    replica = num_gpus // layout.data
    if num_gpus > per_node and per_node % replica and replica % per_node:
        raise ConfigError(
            f"its {layout.data} data-parallel replicas of {replica} GPUs do not fit evenly on nodes of {per_node}",
            where=where,
            remedy="choose a data parallel size so that a replica fills a part of a node, or whole nodes",
        )


def has_router(args: Settings, num_engines: int) -> bool:
    """Return whether a model with `num_engines` engines has a router; a single engine may answer by itself."""
    return num_engines > 1 or args.vllm_router_ip is not None or planned_kind(args).needs_router


def plan_routers(args: Settings, engines: list[EngineSpec]) -> list[RouterSpec]:
    """Return one router per model, in front of its `engines`, or of the external engines."""
    if not engines and not args.rollout_external_engine_addrs:
        return []
    models = served_models(args)
    default = policy_model(models)
    ports = [None] * len(models) if args.port is None else range(args.port, args.port + len(models))
    host, external_port = args.vllm_router_ip, args.vllm_router_port
    external = (host, external_port) if host is not None and external_port is not None else None
    kind, out = planned_kind(args).router, []
    for model, port in zip(models, ports, strict=True):
        mine = [engine for engine in engines if engine.model == model.name]
        out.append(
            RouterSpec(
                model.name,
                tuple(engine.index for engine in mine),
                tuple(kind.words(args)),
                model.disaggregated,
                next((engine.kv_connector for engine in mine if engine.kv_connector), ""),
                external,
                model is default,
                port,
                kind,
            )
        )
    return out


def describe_engines(args: Settings) -> Iterator[str]:
    """Yield the lines of `instep plan` about engines and routers, if the kind of the engines shows them.

    Words in capitals replace addresses, which are known only when a run starts.
    """
    kind, engines = planned_kind(args), plan_engines(args)
    nowhere = Addresses("HOST", "PORT")
    if not all(kind.plan_line(engine, nowhere, 0, "HOST") for engine in engines):
        return
    for router in plan_routers(args, engines):
        default = ", which rollouts use by default" if router.default and len(served_models(args)) > 1 else ""
        yield f"model {router.model}{default}"
        mine = [engines[i] for i in router.engines]
        for _, some in groupby(mine, lambda engine: (engine.role, engine.flags, engine.parallel)):
            alike = list(some)  # except for place and port
            yield "  " + _summary(alike)
            one = alike[0]
            at = Addresses("HOST", one.port or "PORT", "MASTER", "MASTER_PORT", "RPC_PORT", "SIDE_CHANNEL_PORT")
            for rank in range(len(one.nodes)):
                name, host = (f"node {rank} of it: ", f"HOST_{rank}") if len(one.nodes) > 1 else ("", "HOST")
                yield f"    {name}{kind.plan_line(one, at, rank, host)}"
        if router.external is not None:
            yield f"  router: {router.external[0]}:{router.external[1]}, which is not instep's"
        else:
            members = [(engine.role, f"URL_{engine.index}") for engine in mine]
            yield f"  router: {router.kind.program} {shlex.join(router.arguments('HOST', 'PORT', 'PORT', members))}"


def _summary(alike: list[EngineSpec]) -> str:
    first, last = alike[0], alike[-1]
    numbers = f"engine {first.index}" if first is last else f"engines {first.index}-{last.index}"
    gpus = f"{first.num_gpus} GPU{'s' if first.num_gpus > 1 else ''}" + (" each" if len(alike) > 1 else "")
    ports = "" if first.port is None else f", port {first.port}" + (f"-{last.port}" if last is not first else "")
    weights = "gets the trainer's weights" if first.update_weights else "keeps its weights"
    return f"{numbers}: {first.role}, {gpus} ({first.parallel}){ports}, {weights}"


def gpu_sharing(args: Settings) -> Sharing:
    """Return whether the engines that get weights share the trainer's GPUs; None: some do, unknown, or on a CPU."""
    fed = [engine for engine in plan_engines(args) if engine.update_weights]
    if args.device == "cpu" or args.rollout_external_engine_addrs or not fed:
        return None
    ranks, theirs = set(make_plan(args).actor), {slot for engine in fed for slot in engine.slots}
    if theirs <= ranks:
        return "shared"
    return None if theirs & ranks else "apart"


def planned_way(args: Settings) -> str:
    """Return the way of the weight syncs if the controller is on the host of rank 0; an open device counts as GPUs."""
    actor = make_plan(args).actor
    hosts = {slot.node for engine in plan_engines(args) if engine.update_weights for slot in engine.slots}
    one_host = not elsewhere(args) and hosts <= {slot.node for slot in actor[:1]}
    return way_meant(args.weight_sync, one_host, gpu_sharing(args))[0]


def elsewhere(args: EngineSettings) -> list[str]:
    """Return the addresses of `--rollout-external-engine-addrs` on other hosts."""
    addresses = args.rollout_external_engine_addrs or ()
    return [a for a in addresses if a.rpartition(":")[0] not in ("127.0.0.1", "localhost")]

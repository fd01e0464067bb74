"""The placement: the GPU of each rank and each engine, as a pure function of the arguments.

Slots are numbered node by node, `--num-gpus-per-node` on each; without GPUs a slot is a CPU process. The actor's ranks
take the first slots, then PPO's critic, then the engines. With `--colocate` the engines take the trainer's slots.
Engines come in the order of `--vllm-config`, where a placeholder keeps slots free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.algorithms.catalog import OFFLINE, algorithm_of
from instep.arguments.settings import EngineSettings, Settings
from instep.engines.spec import Slot
from instep.engines.topology import ServedModel, file_of, served_models
from instep.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Plan:
    """The slots of all ranks and engines.

    Attributes:
        actor, critic: the slot of each rank; empty with `--debug-rollout-only`.
        engines: the slots of each engine, within one node or over whole nodes.
        reserved: the slots of placeholders (`--vllm-config`).
    """

    num_gpus_per_node: int
    actor: tuple[Slot, ...]
    critic: tuple[Slot, ...] = ()
    engines: tuple[tuple[Slot, ...], ...] = ()
    reserved: tuple[Slot, ...] = ()

    @property
    def nodes(self) -> list[list[int]]:
        """The used GPUs of each node, in order."""
        used = {*self.actor, *self.critic, *self.reserved, *(slot for engine in self.engines for slot in engine)}
        count = max(slot.node for slot in used) + 1
        return [sorted(slot.gpu for slot in used if slot.node == node) for node in range(count)]

    @property
    def num_gpus(self) -> int:
        return sum(len(gpus) for gpus in self.nodes)


def make_plan(args: Settings) -> Plan:
    """Return the plan of a run; offline commands and `--debug-train-only` have no engines.

    Raises:
        ConfigError: the numbers of GPUs do not fit together.
    """
    per_node = node_size(args)
    num_actor = _role("actor", args.actor_num_nodes, args.actor_num_gpus_per_node, per_node)
    num_critic = num_critic_gpus(args)
    if num_critic:
        _role("critic", 1, args.critic_num_gpus_per_node or args.actor_num_gpus_per_node, per_node)
    trainer = [Slot(*divmod(i, per_node)) for i in range(num_actor + num_critic)]
    no_engines = args.command in OFFLINE or args.debug_train_only
    models = () if no_engines else served_models(args)
    for model in models:
        _check_engines(model, per_node, colocate=args.colocate)
    if args.colocate and not no_engines:
        _check_colocated(args, models, len(trainer), per_node)
    position = 0 if args.colocate or args.debug_rollout_only else len(trainer)
    engines, reserved = list[tuple[Slot, ...]](), list[Slot]()
    for group in (group for model in models for group in model.groups):
        placeholder = group.role == "placeholder"
        size = group.num_gpus if placeholder else group.num_gpus_per_engine
        for _ in range(1 if placeholder else group.num_engines):
            if not placeholder and position % per_node + min(size, per_node) > per_node:
                position += -position % per_node  # the rest of this node is too small
            slots = tuple(Slot(*divmod(i, per_node)) for i in range(position, position + size))
            position += size
            if placeholder:
                reserved += slots
            else:
                engines.append(slots)
    actor, critic = tuple(trainer[:num_actor]), tuple(trainer[num_actor:])
    if args.debug_rollout_only:
        actor = critic = ()
    return Plan(per_node, actor, critic, tuple(engines), tuple(reserved))


def node_size(args: Settings) -> int:
    """Return the number of GPUs of a node. The only node of a local cluster has all GPUs that the run asks for."""
    if args.planned or args.cluster == "ray":
        return int(args.num_gpus_per_node)
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node + num_critic_gpus(args)
    return max(int(args.num_gpus_per_node), trainer + args.topology_num_gpus)


def num_critic_gpus(args: Settings) -> int:
    """Return the number of the critic's GPUs, by default the actor's; 0 for an algorithm without a critic."""
    if not algorithm_of(args).has_critic:
        return 0
    nodes = args.critic_num_nodes or args.actor_num_nodes
    return int(nodes * (args.critic_num_gpus_per_node or args.actor_num_gpus_per_node))


def _role(role: str, num_nodes: int, num_gpus: int, per_node: int) -> int:
    if num_gpus > per_node:
        raise ConfigError(
            f"{num_gpus} GPUs are more than the {per_node} of a node",
            where=f"--{role}-num-gpus-per-node",
            remedy=f"use at most {per_node}, or set --num-gpus-per-node if the nodes have more",
        )
    return num_nodes * num_gpus


def _check_engines(model: ServedModel, per_node: int, *, colocate: bool) -> None:
    for group in (g for g in model.groups if g.role != "placeholder"):
        size, total = group.num_gpus_per_engine, group.num_gpus
        if total and size > per_node and size % per_node:
            what = f"an engine of {size} GPUs does not fill whole nodes of {per_node}"
            raise ConfigError(what, where=model.where, remedy=f"use a multiple of {per_node}, or at most {per_node}")
        if total % size:
            whose = "GPUs of the trainer (--colocate)" if colocate else "GPUs of --rollout-num-gpus"
            raise ConfigError(
                f"{total} {whose} are not a multiple of the {size} of an engine",
                where=model.where,
                remedy="use a divisor" if colocate else f"use {total // size * size or size} or another size",
            )


def _check_colocated(args: EngineSettings, models: tuple[ServedModel, ...], num_trainer: int, per_node: int) -> None:
    """Raise ConfigError if engines leave GPUs of the trainer unused, or if an engine would cross a node boundary."""
    total = sum(model.num_gpus for model in models)
    if args.vllm_topology is not None and total < num_trainer:
        raise ConfigError(
            f"its groups take {total} GPUs, but the trainer, which shares with engines (--colocate), has {num_trainer}",
            where=file_of(args),
            remedy="add a placeholder group for GPUs without an engine",
        )
    for model in models:
        for group in model.groups:
            size = group.num_gpus_per_engine
            if group.num_engines and size < per_node < total and per_node % size:
                what = f"engines of {size} GPUs on the trainer's would cross the boundaries of nodes of {per_node}"
                raise ConfigError(what, where=f"{model.where} with --colocate", remedy=f"use a divisor of {per_node}")


def describe(plan: Plan) -> list[tuple[str, int, str]]:
    """Return the plan as rows (who, node, GPUs), such as ("actor ranks 0-3", 0, "0-3"); one row per node of each."""
    rows = []
    for role, slots in (("actor", plan.actor), ("critic", plan.critic)):
        for node, ranks in _by_node(slots):
            who = f"{role} rank{'s' if len(ranks) > 1 else ''} {_span(ranks)}"
            rows.append((who, node, _span([slots[rank].gpu for rank in ranks])))
    engines = [(f"engine {index}", slots) for index, slots in enumerate(plan.engines)]
    for who, slots in (*engines, ("placeholder", plan.reserved)):
        rows += [(who, node, _span([slots[i].gpu for i in part])) for node, part in _by_node(slots)]
    return rows


def table(plan: Plan) -> Table:
    """Return the table for `instep plan`."""
    from rich.table import Table

    gpus, nodes = (
        f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((plan.num_gpus, "GPU"), (len(plan.nodes), "node"))
    )
    out = Table(title=f"{gpus} on {nodes} of {plan.num_gpus_per_node}")
    out.add_column("who")
    out.add_column("node", justify="right")
    out.add_column("GPUs", justify="right")
    for who, node, where in describe(plan):
        out.add_row(who, str(node), where)
    return out


def _by_node(slots: Sequence[Slot]) -> list[tuple[int, list[int]]]:
    """Return each node of `slots`, with the indices of the slots on it."""
    return [(n, [i for i, slot in enumerate(slots) if slot.node == n]) for n in sorted({slot.node for slot in slots})]


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"

"""Which GPU each rank and each engine gets: a pure function of the arguments, before anything starts.

Slots are counted node by node, `--num-gpus-per-node` on each; without GPUs a slot is a CPU process. The actor's ranks
take the first, then the critic's (PPO), then the engines; with `--colocate` the engines take those of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

OFFLINE = ("sft", "dpo")  # the commands that sample nothing: no engine, no critic


@dataclass(frozen=True, order=True)
class Slot:
    """One GPU (or one CPU process) of one node."""

    node: int
    gpu: int


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Attributes:
        actor, critic: the slot of each rank; none with `--debug-rollout-only`.
        engines: the slots of each engine, within one node or over whole nodes.
    """

    num_gpus_per_node: int
    actor: tuple[Slot, ...]
    critic: tuple[Slot, ...] = ()
    engines: tuple[tuple[Slot, ...], ...] = ()

    @property
    def nodes(self) -> list[list[int]]:
        """Per node, its GPUs that are used, in order."""
        used = {*self.actor, *self.critic, *(slot for engine in self.engines for slot in engine)}
        count = max(slot.node for slot in used) + 1
        return [sorted(slot.gpu for slot in used if slot.node == node) for node in range(count)]

    @property
    def num_gpus(self) -> int:
        return sum(len(gpus) for gpus in self.nodes)


def make_plan(args: Any) -> Plan:
    """The plan of a command line.

    Args:
        args: `actor_num_nodes`, `actor_num_gpus_per_node`, `critic_num_nodes`, `critic_num_gpus_per_node`,
            `advantage_estimator`, `rollout_num_gpus`, `rollout_num_gpus_per_engine`, `num_gpus_per_node`, `colocate`,
            `command` (sft has no engines), `debug_train_only` (neither) and `debug_rollout_only` (no trainer).

    Raises:
        ConfigError: the counts do not fit together.
    """
    per_node = args.num_gpus_per_node
    num_actor = _role("actor", args.actor_num_nodes, args.actor_num_gpus_per_node, per_node)
    num_critic = num_critic_gpus(args)
    if num_critic:
        _role("critic", 1, args.critic_num_gpus_per_node or args.actor_num_gpus_per_node, per_node)
    trainer = [Slot(*divmod(i, per_node)) for i in range(num_actor + num_critic)]
    size = args.rollout_num_gpus_per_engine
    no_engines = args.command in OFFLINE or args.debug_train_only
    total = 0 if no_engines else len(trainer) if args.colocate else args.rollout_num_gpus
    _check_engines(total, size, per_node, colocate=args.colocate)
    position = 0 if args.colocate or args.debug_rollout_only else len(trainer)
    engines = []
    for _ in range(total // size):
        if position % per_node + min(size, per_node) > per_node:  # the rest of this node is too small
            position += -position % per_node
        engines.append(tuple(Slot(*divmod(i, per_node)) for i in range(position, position + size)))
        position += size
    if args.debug_rollout_only:
        return Plan(per_node, (), (), tuple(engines))
    return Plan(per_node, tuple(trainer[:num_actor]), tuple(trainer[num_actor:]), tuple(engines))


def num_critic_gpus(args: Any) -> int:
    """GPUs of PPO's critic: as many as the actor's unless said otherwise; 0 without PPO."""
    if args.advantage_estimator != "ppo" or args.command in OFFLINE:
        return 0
    nodes = args.critic_num_nodes or args.actor_num_nodes
    return int(nodes * (args.critic_num_gpus_per_node or args.actor_num_gpus_per_node))


def _role(role: str, num_nodes: int, num_gpus: int, per_node: int) -> int:
    if num_gpus > per_node:
        raise ConfigError(
            f"{num_gpus} GPUs of a node that has {per_node}",
            where=f"--{role}-num-gpus-per-node",
            remedy=f"use at most {per_node}, or say with --num-gpus-per-node that the nodes have more",
        )
    return num_nodes * num_gpus


def _check_engines(total: int, size: int, per_node: int, *, colocate: bool) -> None:
    if not total:
        return
    if size > per_node and size % per_node:
        raise ConfigError(
            f"an engine of {size} GPUs does not fill whole nodes of {per_node}",
            where="--rollout-num-gpus-per-engine",
            remedy=f"use a multiple of {per_node}, or at most {per_node}",
        )
    if total % size:
        whose = "GPUs of the trainer (--colocate)" if colocate else "GPUs of --rollout-num-gpus"
        raise ConfigError(
            f"{total} {whose} are no multiple of the {size} of an engine",
            where="--rollout-num-gpus-per-engine",
            remedy="use a divisor" if colocate else f"use {total // size * size or size} or another size of an engine",
        )
    if colocate and size < per_node < total and per_node % size:
        raise ConfigError(
            f"engines of {size} GPUs on the trainer's would lie across nodes of {per_node}",
            where="--rollout-num-gpus-per-engine with --colocate",
            remedy=f"use a divisor of {per_node}",
        )


def describe(plan: Plan) -> list[tuple[str, int, str]]:
    """The plan as rows (who, node, GPUs), such as ("actor ranks 0-3", 0, "0-3"); one row per node of each."""
    rows = []
    for role, slots in (("actor", plan.actor), ("critic", plan.critic)):
        for node, ranks in _by_node(list(enumerate(slots))):
            rows.append((f"{role} {_count('rank', [r for r, _ in ranks])}", node, _span([s.gpu for _, s in ranks])))
    for index, engine in enumerate(plan.engines):
        for node, part in _by_node(list(enumerate(engine))):
            rows.append((f"engine {index}", node, _span([s.gpu for _, s in part])))
    return rows


def table(plan: Plan) -> Table:
    """What `instep plan` prints."""
    from rich.table import Table

    nodes = len(plan.nodes)
    out = Table(title=f"{plan.num_gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''} of {plan.num_gpus_per_node}")
    out.add_column("who")
    out.add_column("node", justify="right")
    out.add_column("GPUs", justify="right")
    for who, node, gpus in describe(plan):
        out.add_row(who, str(node), gpus)
    return out


def _by_node(ranked: list[tuple[int, Slot]]) -> list[tuple[int, list[tuple[int, Slot]]]]:
    nodes = sorted({slot.node for _, slot in ranked})
    return [(node, [item for item in ranked if item[1].node == node]) for node in nodes]


def _count(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {_span(numbers)}"


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"

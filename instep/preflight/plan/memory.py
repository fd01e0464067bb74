"""The memory of every kind of GPU of a run by phase, the tightest phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from instep.algorithms.catalog import OFFLINE, uses_reference
from instep.arguments.args import Args
from instep.arguments.settings import Settings
from instep.cluster.engine_plan import plan_engines
from instep.cluster.placement import make_plan
from instep.engines.spec import EngineSpec, Slot
from instep.models.sizes import Shape, shape_of
from instep.preflight.plan.engine import EnginePlan, plan_engine
from instep.preflight.plan.place import CPU_PROCESS, GB, memory_of
from instep.preflight.plan.trainer import BUCKETS, LIBRARIES, PHASES, Item, frozen, items, rank_of

MARGIN = 1.1  # the estimate is good to 10 %: a plan is refused if it needs more than this times a card
TIGHT = 0.95  # of a card; a plan that needs more is reported as close


@dataclass(frozen=True)
class Gpus:
    """GPUs with the same contents; on a CPU, hosts.

    Attributes:
        size: bytes of one of them.
        names: where they are, such as "node 0 GPU 0,1". count: their number.
        phases: those that the command has.
        what: "GPU" or "host".
    """

    size: float
    names: str
    count: int
    items: tuple[Item, ...]
    engines: tuple[EnginePlan, ...]
    phases: tuple[str, ...] = PHASES
    what: str = "GPU"

    def need(self, phase: str) -> float:
        """Return the peak bytes of a phase."""
        return sum(item.gpu.get(phase, 0.0) for item in self.items)

    @property
    def tightest(self) -> str:
        return max(self.phases, key=self.need)

    @property
    def most(self) -> float:
        return self.need(self.tightest)

    @property
    def host(self) -> float:
        """Host memory per GPU."""
        return sum(item.host for item in self.items)

    @property
    def trains(self) -> bool:
        """Whether a rank of a trainer is on it."""
        return any(item.owner in ("actor", "critic") for item in self.items)

    @property
    def starved(self) -> EnginePlan | None:
        """An engine whose KV cache holds no request, even with the margin of the estimate. vLLM would not start."""
        slack = (MARGIN - 1) * self.size
        return next((engine for engine in self.engines if engine.cache + slack < engine.per_request), None)

    @property
    def fits(self) -> bool:
        return self.most <= self.size and all(engine.requests for engine in self.engines)

    @property
    def is_refused(self) -> bool:
        return self.most > MARGIN * self.size or self.starved is not None


def plan_memory(args: Settings, *, shares: bool = True) -> list[Gpus]:
    """Return each kind of GPU of a run, on a CPU of host; empty if the model's configuration is not known.

    Args:
        shares: whether the common prefix of a group's samples is computed once, as in `hf`.

    Raises:
        ConfigError: the ranks and engines cannot be placed.
    """
    shape = shape_of(args.hf_checkpoint)
    if shape is None:
        return []
    on_cpu = args.device == "cpu"
    if on_cpu:
        args = cast(Args, args).replace(offload_train=False, offload_rollout=False)  # as in the run
    plan, engines, size = make_plan(args), plan_engines(args), memory_of(args)
    holders: dict[Slot, list[Any]] = {}
    roles = dict[str | EngineSpec, tuple[Slot, ...]](actor=plan.actor, critic=plan.critic)
    for holder, slots in [*roles.items(), *((engine, engine.slots) for engine in engines)]:
        for slot in slots:
            holders.setdefault(Slot(slot.node, 0) if on_cpu else slot, []).append(holder)
    alike: dict[tuple[Any, ...], list[Slot]] = {}
    for slot, held in sorted(holders.items()):
        alike.setdefault(tuple(_kind(h) for h in held), []).append(slot)
    out = []
    for same in alike.values():
        parts: list[Item] = []
        planned: list[EnginePlan] = []
        for holder, its_ranks in groupby(holders[same[0]]):  # on a CPU all those of a host
            count = len(list(its_ranks))
            if isinstance(holder, str):
                parts += count * _trainer(args, shape, holder, shares, _is_viewed(args, holders[same[0]]))
            elif (served := shape_of(holder.path)) is not None:
                planned.append(plan_engine(args, holder, served, size))
                parts += count * planned[-1].items()
        where, what = (_where(same), "GPU") if not on_cpu else (f"node {_listed(s.node for s in same)}", "host")
        parts = _on_host(parts) if on_cpu else parts
        out.append(Gpus(size, where, len(same), tuple(parts), tuple(planned), _phases(args), what))
    return out


def _phases(args: Settings) -> tuple[str, ...]:
    """Return the phases of a step."""
    scores = PHASES[1:2] if uses_reference(args) else ()
    return (*scores, "training") if args.command in OFFLINE else PHASES


def _on_host(parts: Sequence[Item]) -> list[Item]:
    """Return the items of a host whose ranks and engines compute on its CPU, with those of the controller."""
    sums = {("controller", "process"): dict.fromkeys(PHASES, CPU_PROCESS)}
    for part in parts:
        held = sums.setdefault((part.owner, part.name), dict.fromkeys(PHASES, 0.0))
        for phase in PHASES:
            held[phase] += part.gpu.get(phase, 0.0) + part.host
    return [Item(owner, name, held) for (owner, name), held in sums.items()]


def _kind(holder: str | EngineSpec) -> Any:
    if isinstance(holder, str):
        return holder
    return holder.path, holder.role, holder.parallel, holder.flags, holder.sleeps


def _is_viewed(args: Settings, held: Sequence[str | EngineSpec]) -> bool:
    """Return whether trainer and an engine on its GPU can share parameters. External servers are not planned."""
    wanted, fed = args.tensor_model_parallel_size, [e for e in held if isinstance(e, EngineSpec) and e.update_weights]
    alike = any(e.parallel.tensor == wanted and e.parallel.pipeline == 1 for e in fed)
    return alike or bool(args.rollout_external_engine_addrs)


def _trainer(args: Settings, shape: Shape, role: str, shares: bool, viewed: bool) -> list[Item]:
    rank = rank_of(args, shape, role, shares=shares, viewed=viewed)
    out = items(rank)
    if role == "actor":
        if uses_reference(args) and not rank.adapter:
            out.append(frozen(rank, shape_of(args.ref_load) or shape, "reference"))
        if args.opd_teacher_load:
            out.append(frozen(rank, shape_of(args.opd_teacher_load) or shape, "teacher"))
    return out


def allocated(args: Settings, *, shares: bool = True, synced: bool = True) -> float:
    """Return torch's peak bytes on an actor's GPU during a training (`perf/gpu_peak_bytes`).

    Args:
        synced: whether there was a sync; its buckets stay allocated.
    """
    shape = shape_of(args.hf_checkpoint)
    assert shape is not None, "a model with a config.json"
    without = {LIBRARIES} if synced else {LIBRARIES, BUCKETS}
    found = items(rank_of(args, shape, shares=shares))
    return sum(item.gpu.get("training", 0.0) for item in found if item.name not in without)


def _where(slots: Sequence[Slot]) -> str:
    nodes: dict[int, list[int]] = {}
    for slot in slots:
        nodes.setdefault(slot.node, []).append(slot.gpu)
    return "; ".join(f"node {node} GPU {_listed(gpus)}" for node, gpus in nodes.items())


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


# ---- output ----------------------------------------------------------------------------------------------------------


def tables(gpus: Sequence[Gpus]) -> Iterator[Any]:
    """Yield, for each kind of GPU, a table for `rich` and lines of text."""
    from rich.table import Table

    for kind in gpus:
        each = "" if kind.count == 1 else f", each of {kind.count}"
        table = Table(title=f"GB on {kind.names}{each} ({kind.size / GB:.0f} GB), estimated", title_justify="left")
        table.add_column("whose, what")
        host = ("host",) if kind.host else ()
        for name in (*kind.phases, *host):
            table.add_column(name, justify="right")
        for item in kind.items:
            sizes = [*(item.gpu.get(phase, 0.0) for phase in kind.phases), *(item.host for _ in host)]
            if any(size >= 0.005 * GB for size in sizes):
                table.add_row(f"{item.owner}: {item.name}", *map(_shown, sizes))
        table.add_section()
        table.add_row("sum", *(_shown(kind.need(phase)) for phase in kind.phases), *(_shown(kind.host) for _ in host))
        table.add_row("free", *(_shown(kind.size - kind.need(phase), "-") for phase in kind.phases))
        yield table
        yield from _lines(kind)


def _lines(kind: Gpus) -> Iterator[str]:
    left = kind.size - kind.most
    rest = f"{left / GB:.1f} GB free" if left >= 0 else f"{-left / GB:.1f} GB too many"
    yield f"tightest: {kind.tightest}, {kind.most / GB:.1f} of {kind.size / GB:.1f} GB, {rest}"
    if kind.fits and kind.most > TIGHT * kind.size:
        yield "this is close: the estimate is good to about 10 %"
    for engine in kind.engines:
        yield (
            f"{engine.spec.name}: the KV cache holds {engine.tokens:,} tokens, {engine.requests:,} requests of "
            f"{engine.longest:,} tokens at once"
        )


def _shown(size: float, none: str = "") -> str:
    return none if abs(size) < 0.005 * GB else f"{size / GB:.2f}"


def as_json(gpus: Sequence[Gpus]) -> list[dict[str, Any]]:
    """Return the bytes by kind of GPU, item and phase."""
    return [
        {
            "gpus": kind.names,
            "count": kind.count,
            "bytes": kind.size,
            "need": {phase: kind.need(phase) for phase in kind.phases},
            "host_bytes": kind.host,
            "fits": kind.fits,
            "items": [{"owner": i.owner, "name": i.name, **i.gpu, "host": i.host} for i in kind.items],
            "engines": [
                {"name": e.spec.name, "kv_tokens": e.tokens, "requests": e.requests, "request_tokens": e.longest}
                for e in kind.engines
            ],
        }
        for kind in gpus
    ]

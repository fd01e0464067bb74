"""Where the processes run, and how many there are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE, ONLINE
from instep.arguments.concern import Given, Problem, Settings, flag_name, ranks_of_a_copy
from instep.arguments.flag import GPUS, read_flags
from instep.cluster.engine_plan import elsewhere, gpu_sharing, plan_engines
from instep.cluster.placement import make_plan, num_critic_gpus
from instep.engines.backend_choice import named_kind
from instep.engines.topology import served_models
from instep.system.processes import num_usable_cpus
from instep.weights.way import ON_ONE_HOST, RESTART, SINGLE_COPY, expandable

CLUSTER = read_flags(__file__)


# ---- what follows from the flags -------------------------------------------------------------------------------------


def precision(args: Settings, given: Given) -> str:
    """Return the precision of the device; `auto` if neither is known yet."""
    if args.precision != "auto":
        return args.precision
    return "bf16" if args.bf16 else {"cpu": "fp32", "cuda": "bf16"}.get(args.device, "auto")


def cluster(args: Settings, given: Given) -> str:
    """Return the kind of cluster: `ray` for more than one host."""
    several = max(args.actor_num_nodes, args.critic_num_nodes or 1) > 1
    return "ray" if several and "cluster" not in given else args.cluster


def actor_num_gpus_per_node(args: Settings, given: Given) -> int:
    """Return the ranks per host: by default 8; on the CPUs of this host, the ranks of one copy of the model.

    More ranks would only take turns on its cores.
    """
    if args.device != "cpu" or args.cluster != "local" or "actor_num_gpus_per_node" in given:
        return args.actor_num_gpus_per_node
    return ranks_of_a_copy(args)


def world_size(args: Settings, given: Given) -> int:
    """Return the number of the actor's ranks."""
    return args.actor_num_nodes * args.actor_num_gpus_per_node


def dp_size(args: Settings, given: Given) -> int:
    """Return the actor's data-parallel ranks. A rule reports a number of ranks that TP x PP x CP does not divide."""
    return max(1, args.world_size // ranks_of_a_copy(args))


def rollout_num_gpus(args: Settings, given: Given) -> int:
    """Return the GPUs of all engines that this run starts."""
    if args.command in OFFLINE or args.debug_train_only:
        return 0
    if args.vllm_topology is not None and (args.colocate or "rollout_num_gpus" not in given):
        return _served_gpus(args)
    if args.rollout_external_engine_addrs:
        return 0
    if args.colocate:
        return args.world_size + num_critic_gpus(args)
    return args.rollout_num_gpus or args.rollout_num_gpus_per_engine


def topology_num_gpus(args: Settings, given: Given) -> int:
    """Return the GPUs of all engines and placeholders in `--vllm-config` or the flags."""
    return 0 if args.command in OFFLINE else _served_gpus(args)


def rollout_num_engines(args: Settings, given: Given) -> int:
    models = () if args.command in OFFLINE else served_models(args)
    return sum(group.num_engines for model in models for group in model.groups)


def _served_gpus(args: Settings) -> int:
    return sum(model.num_gpus for model in served_models(args))


def notes(args: Settings, given: Given) -> list[str]:
    """Return notes to the user. The only one here: the engines use the trainer's GPUs. Rules add more."""
    shares = args.colocate and not args.rollout_external_engine_addrs and args.command not in OFFLINE
    trainer, asked = args.world_size + num_critic_gpus(args), given.get("rollout_num_gpus")
    if not shares or asked in (None, trainer):
        return []
    return [f"--colocate: --rollout-num-gpus {asked} is ignored: the engines use the trainer's {trainer}"]


RESOLVERS = (
    *(precision, cluster, actor_num_gpus_per_node, world_size, dp_size),
    *(notes, rollout_num_gpus, topology_num_gpus, rollout_num_engines),
)

# ---- rules -----------------------------------------------------------------------------------------------------------


def cpu_cores(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the CPU cores for the ranks. Two ranks on a core are slow; with more, the start can time out."""
    cores, ranks = num_usable_cpus(), args.world_size + num_critic_gpus(args)
    if args.device != "cpu" or args.cluster != "local" or ranks <= cores:
        return
    where, what = "--actor-num-gpus-per-node", f"{ranks} trainer ranks on {cores} CPU cores"
    if ranks > 2 * cores:
        yield Problem(what, where, f"use at most {2 * cores}; 1 is usual on a CPU")
    else:
        yield Problem(f"{what} take turns: this is slow", where, refused=False)


def engine_size(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.command in OFFLINE:
        return
    kind, size = named_kind(args), args.rollout_num_gpus_per_engine
    if kind is not None and kind.max_num_gpus is not None and size > kind.max_num_gpus and args.vllm_topology is None:
        what = f"{size} GPUs, but {kind.title} uses {kind.max_num_gpus}"
        remedy = f"use at most {kind.max_num_gpus}, or another --rollout-backend"
        yield Problem(what, "--rollout-num-gpus-per-engine", remedy)


def external_engines(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the addresses of engines that already run."""
    if args.command in OFFLINE:
        return
    addresses = args.rollout_external_engine_addrs or ()
    for address in sorted({a for a in addresses if addresses.count(a) > 1}):
        yield Problem(f"{address} is named twice", "--rollout-external-engine-addrs", "name each engine once")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            what = f"'{address}' is not HOST:PORT"
            yield Problem(what, "--rollout-external-engine-addrs", "write it like 127.0.0.1:8000")
        elif args.weight_sync in ON_ONE_HOST and address in elsewhere(args) and args.command in ONLINE:
            remedy = "use --weight-sync disk (through --run-dir, a folder that both hosts see)"
            yield Problem(f"{address} cannot use this host's shared memory", "--rollout-external-engine-addrs", remedy)
        elif args.weight_sync == "nccl" and args.cluster == "local" and address in elsewhere(args):
            remedy = "use --cluster ray, or --weight-sync disk (through --run-dir, a folder that both hosts see)"
            yield Problem(f"{address} cannot reach the trainer's address", "--weight-sync nccl", remedy)
    if args.rollout_external_engine_addrs and args.colocate:
        yield Problem("engines that already run have their own GPUs", "--colocate", "leave it out")


def own_gpus(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that NCCL is not used between two processes on one GPU: it does not support that."""
    if args.weight_sync == "nccl" and args.colocate and args.device == "cuda":
        what = "NCCL needs a GPU for each process"
        yield Problem(what, "--weight-sync nccl with --colocate", "use --weight-sync ipc")


def same_gpus(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check `--weight-sync ipc`: a bucket reaches only engines on the same GPU, and they must be able to open it."""
    if args.weight_sync != "ipc" or args.device != "cuda" or args.debug_train_only or args.debug_rollout_only:
        return
    if (name := expandable()) is not None:
        what = "opens GPU memory of another process; expandable segments do not allow that"
        remedy = "remove them, or use --weight-sync auto"
        yield Problem(what, f"--weight-sync ipc with expandable_segments in {name}", remedy)
    if gpu_sharing(args) != "shared" and not args.rollout_external_engine_addrs:
        what = "needs a rank of the trainer on each GPU of the engines (see `instep plan`)"
        yield Problem(what, "--weight-sync ipc", "use --colocate, or --weight-sync nccl")


def hosts(args: Settings, given: set[str]) -> Iterator[Problem]:
    local = not args.planned and args.cluster == "local"
    several = "--actor-num-nodes" if args.actor_num_nodes > 1 else "--critic-num-nodes"
    if local and max(args.actor_num_nodes, args.critic_num_nodes or 1) > 1:
        yield Problem("the local cluster is one host", several, "leave out --cluster local, or use 1")
    elif args.cluster == "ray" and "cluster" not in given:
        yield Problem("asks for more than one host, so the run uses --cluster ray", several, refused=False)
    for name in ("ray_address", "num_gpus_per_node"):
        if local and name in given:
            yield Problem("has no effect without --cluster ray", flag_name(name), "give both")
    if not args.planned and not local and importlib.util.find_spec("ray") is None:
        remedy = "`instep install ray` on every host, or leave --cluster out on one host"
        yield Problem("Ray is not installed here", "--cluster ray" if "cluster" in given else several, remedy)


def placement(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that ranks and engines can be placed, and that weights can reach every engine."""
    ranks = args.world_size + num_critic_gpus(args) + max(args.rollout_num_gpus, args.topology_num_gpus)
    if ranks > GPUS.high:  # the plan has an entry for each of them
        yield Problem(f"{ranks} ranks or GPUs, but the limit is {GPUS.high}", "the cluster", "lower the numbers")
        return
    plan, planned = make_plan(args), plan_engines(args)
    homes = {plan.actor[0].node} if plan.actor else set()
    away = [engine for engine in planned if engine.update_weights and {s.node for s in engine.slots} - homes]
    if homes and away and args.command in ONLINE and args.weight_sync in ON_ONE_HOST:
        yield Problem(
            f"{away[0].name} is planned on another host than rank 0 of the trainer (see `instep plan`), and cannot "
            "use its shared memory",
            f"--weight-sync {args.weight_sync} with --cluster ray",
            "use --weight-sync disk (through --run-dir, a folder that all hosts share), or --colocate",
        )


def restart(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check `--weight-sync restart`: a run restarts only its own engines, and a restart ends their requests."""
    if args.weight_sync != RESTART or args.command not in ONLINE:
        return
    if args.rollout_external_engine_addrs:
        what = "this run cannot restart engines that it did not start"
        yield Problem(what, "--weight-sync restart with --rollout-external-engine-addrs", "use --weight-sync disk")
    if args.pause_mode == "keep":
        what = "a restarted engine keeps no responses"
        yield Problem(what, "--weight-sync restart with --pause-mode keep", "use --pause-mode abort or wait")


def single_copy(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that engines can share memory with trainer ranks: on this host, and with a GPU on the same GPU."""
    if args.weight_sync != SINGLE_COPY or args.command not in ONLINE:
        if args.vllm_config_path is not None:
            yield Problem("has no effect without --weight-sync single-copy", "--vllm-config-path", "give both")
        return
    addresses = args.rollout_external_engine_addrs or ()
    if args.vllm_config_path is not None and not addresses:
        remedy = "name the server with --rollout-external-engine-addrs"
        yield Problem("is the file of a server that already runs", "--vllm-config-path", remedy)
    if len(addresses) > 1:
        what = f"attaches to one server that already runs, but {len(addresses)} are named"
        yield Problem(what, "--weight-sync single-copy", "name one, or use --weight-sync shm")
    where, shm = "--weight-sync single-copy", "--weight-sync shm"
    if args.cluster != "local":
        yield Problem("shares weights only with engines on the trainer's host", where, f"use {shm}")
        return
    if args.device == "cuda" and args.rollout_backend == "embedded":
        yield Problem("shares weights with an embedded engine only on a CPU", where, f"use --device cpu, or {shm}")
    plan, fed = make_plan(args), [engine for engine in plan_engines(args) if engine.update_weights]
    for engine in fed:
        if engine.parallel.data > 1:
            what = f"{engine.name} has {engine.parallel.data} replicas, but only one can share its weights"
            yield Problem(what, where, f"give each replica its own engine, or use {shm}")
        if engine.parallel.pipeline > 1:
            what = f"{engine.name} has {engine.parallel.pipeline} pipeline stages; these cannot share their weights"
            yield Problem(what, where, f"use tensor parallelism, or {shm}")
        if args.device == "cuda" and not {*engine.slots} <= {*plan.actor}:
            what = f"{engine.name} is planned on a GPU without a trainer rank that could write its weights"
            yield Problem(what, where, "give --colocate (`instep plan` shows the GPUs), or use --weight-sync nccl")


def bf16(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.bf16 and "precision" in given and args.precision != "bf16":
        yield Problem(f"contradicts --precision {args.precision}", "--bf16", "give one of the two")


PLANNED_RULES = (hosts, placement, own_gpus, same_gpus, restart, single_copy)
SERVED_RULES = (engine_size, external_engines, *PLANNED_RULES, bf16)
RULES = (cpu_cores, *SERVED_RULES)

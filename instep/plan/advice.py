"""What to change where a run does not fit: changes of flags, each tried by planning with it, the cheapest first.

And a note where trainer and engines would fit side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from instep.errors import ConfigError
from instep.models.sizes import shape_of
from instep.plan.engine import rollout_samples
from instep.plan.memory import MARGIN, TIGHT, Gpus, plan_memory
from instep.plan.trainer import GB, PARKED

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

Parse = Callable[[Sequence[str]], "Settings"]
_STAY = ("--no-offload-train", "--no-offload-rollout")
SMALLEST = 512  # tokens of a micro-batch
EFFICIENT = 8192  # tokens of a micro-batch that a step begun early has enough with (`controller/role.py`)


def check(gpus: Sequence[Gpus], words: Sequence[str], parse: Parse) -> None:
    """Raise ConfigError if a kind of GPU cannot hold what is planned, with the nearest change that fits.

    Args:
        words: the command line; parse: makes arguments of one.
    """
    kind = next((kind for kind in gpus if kind.is_refused), None)
    if kind is None:
        return
    found = nearest(words, parse)
    if kind.starved is not None:
        engine = kind.starved
        what = f"{engine.spec.name} has room for {engine.tokens:,} tokens of KV cache, and a request may have "
        what += f"{engine.longest:,}"
    else:
        item = max(kind.items, key=lambda item: item.gpu.get(kind.tightest, 0.0))
        what = f"the {kind.tightest} needs about {kind.most / GB:.0f} GB of a GPU that has {kind.size / GB:.0f}; "
        what += f"the most of it are {item.owner}'s {item.name}, {item.gpu[kind.tightest] / GB:.0f} GB"
    where = (
        f"{kind.names} of {kind.size / 2**30:.0f} GiB (--gpu-memory-gb), planned before anything starts (refused from "
    )
    where += f"{MARGIN:.0%} of a GPU on)"
    instead = " ".join(words[at] for at in _replaced(words, found.split()))
    found += f" (without {instead})" if instead else ""
    remedy = f"{found} fits" if found else "use more or larger GPUs: no flag alone makes it fit"
    raise ConfigError(what, where=where, remedy=remedy)


def side_by_side(args: Settings, gpus: Sequence[Gpus], words: Sequence[str], parse: Parse) -> list[str]:
    """A note where trainer and engines take turns by default, and would fit on their GPUs without.

    They fit with efficient micro-batches, and with a KV cache that holds all samples that it held of a rollout.
    """
    asked = any(word in words for word in ("--offload", "--offload-train", "--offload-rollout"))
    if asked or not gpus or args.command == "train-async" or not (args.offload_train and args.offload_rollout):
        return []
    try:
        changed = parse([*words, *_STAY])
        planned = plan_memory(changed)
    except ConfigError:
        return []
    wanted = min(args.max_tokens_per_gpu or 0, EFFICIENT)
    held = _requests(gpus) if args.rollout_batch_size is None else min(_requests(gpus), rollout_samples(args))
    roomy = (changed.max_tokens_per_gpu or 0) >= wanted and _requests(planned) >= held
    if not roomy or not all(kind.fits and kind.most <= TIGHT * kind.size for kind in planned):
        return []
    moved = max(item.host for kind in gpus for item in kind.items if item.name == PARKED) / GB
    gain = (
        f"no step moves {moved:.3g} GB of a GPU to the host and back nor lets engines sleep, and finished groups are "
    )
    gain += "scored and trained on while others are generated, where docs/performance.md says so"
    return [f"trainer and engines would fit on their GPUs side by side: with {' '.join(_STAY)} {gain}"]


def _requests(gpus: Sequence[Gpus]) -> int:
    """The fewest that the KV cache of an engine holds."""
    return min((engine.requests for kind in gpus for engine in kind.engines), default=0)


def nearest(words: Sequence[str], parse: Parse) -> str:
    """The cheapest change of flags with which everything fits, as words of a command line; "" where none does.

    One change is better than several; several are tried from the cheapest on, all of those before included.
    """
    try:
        args = parse(words)
    except ConfigError:
        return ""
    changes = list(_changes(args))
    for change in changes:
        if _fits(words, change, parse):
            return " ".join(change)
    together: list[str] = []
    for strong in _strongest(changes):
        together = [*together, *strong]
        if _fits(words, together, parse):
            return " ".join(together)
    return ""


def _fits(words: Sequence[str], change: Sequence[str], parse: Parse) -> bool:
    replaced = _replaced(words, change)
    kept = [word for at, word in enumerate(words) if at not in replaced]
    try:
        gpus = plan_memory(parse([*kept, *change]))
    except ConfigError:  # flags that do not go together
        return False
    return bool(gpus) and all(kind.fits for kind in gpus)


def _replaced(words: Sequence[str], change: Sequence[str]) -> list[int]:
    """The places of the words that a change contradicts."""
    out = [at for at, word in enumerate(words) if word in _STAY and "--offload" in change]
    if "--max-tokens-per-gpu" in change and "--micro-batch-size" in words:
        at = words.index("--micro-batch-size")
        out += [at, at + 1]
    return out


def _strongest(changes: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The last change of each flag, in order."""
    return list({change[0]: change for change in changes}.values())


def _changes(args: Settings) -> Iterator[list[str]]:
    """Changes of single flags that save memory, the cheapest first."""
    both = args.offload_train and args.offload_rollout
    if args.colocate and not both:
        yield ["--offload"]
    if args.command != "sft" and "gpu_memory_utilization" not in args.vllm_overrides and not args.colocate:
        yield ["--vllm-gpu-memory-utilization", "0.95"]
    if args.colocate and not both:
        for fraction in (0.3, 0.25, 0.2, 0.15):
            yield ["--vllm-gpu-memory-utilization", str(fraction)]
    tokens = args.max_tokens_per_gpu or 2**15
    while tokens >= 2 * SMALLEST:
        tokens //= 2
        yield ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(tokens)]
    layers = ["--recompute-num-layers", "1"]
    hf = args.train_backend == "hf"
    if args.recompute_granularity is None and hf:
        yield ["--recompute-granularity", "selective"]
    if args.recompute_granularity != "full":
        yield ["--recompute-granularity", "full", *([] if hf else ["--recompute-method", "uniform", *layers])]
    if args.optimizer != "adamw_8bit":
        yield ["--optimizer", "adamw_8bit"]
    if not args.optimizer_cpu_offload:
        yield ["--optimizer-cpu-offload"]
    if args.train_backend == "megatron" and args.dp_size > 1 and not args.use_distributed_optimizer:
        yield ["--use-distributed-optimizer"]
    size = 2 * args.tensor_model_parallel_size
    while size <= args.actor_num_gpus_per_node:
        if _divides(args, size):
            yield ["--tensor-model-parallel-size", str(size)]
        size *= 2
    size = 2 * args.actor_num_gpus_per_node
    while size <= 8:
        if hf or _divides(args, size):
            yield ["--actor-num-gpus-per-node", str(size), *(_tp(args, size))]
        size *= 2


def _divides(args: Settings, size: int) -> bool:
    """Whether tensor-parallel ranks can share the model's heads."""
    shape = shape_of(args.hf_checkpoint)
    return shape is not None and (shape.heads if args.train_backend == "hf" else shape.kv_heads) % size == 0


def _tp(args: Settings, size: int) -> list[str]:
    """Megatron shares weights among tensor-parallel ranks alone."""
    return ["--tensor-model-parallel-size", str(size)] if args.train_backend == "megatron" else []

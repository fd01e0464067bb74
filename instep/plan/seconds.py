"""The seconds of a step by phase, by rooflines: FLOP and bytes over what a measured profile of the card says.

What the host does besides (vLLM's scheduler, answers as JSON, a session's calls) is no card's, but was seen on hosts of
one H100; `docs/plan.md` says what was seen, and tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.algorithms.catalog import OFFLINE, algorithm_of, uses_reference
from instep.cluster.engine_plan import plan_engines, planned_way
from instep.engines.kind import planned_kind
from instep.models.sizes import Shape, shape_of
from instep.plan.card import Card, layer_flops
from instep.plan.engine import BLOCK, plan_engine
from instep.plan.trainer import Rank, gradients, kept_logits, lengths, masters, moments, rank_of
from instep.weights.way import SINGLE_COPY

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

# Seen on H100s with 16 cores.
EAGER = 0.5  # of the rate of compiled layers
MEGATRON = 0.94  # of that of compiled layers of hf (`benchmarks/results/train-step-h100.json`)
DECODE = 0.65  # of a copy's bytes a second, in a decode step of vLLM
FAST_STEP, FAST_REQUEST = 3.4e-3, 9e-6  # host seconds of a decode step of vLLM, with instep's fast log-probs
STOCK_STEP, STOCK_REQUEST = 3.4e-3, 62e-6  # and with its own, whose answers are JSON
OPS = 45  # operations of a layer's decode step in the embedded engine
SESSION = 0.13  # calls of a session, and its proof
SHM = 0.85e9  # bytes a second from the trainer's GPU through shared memory and two digests into the engine's
# An engine that goes to sleep and wakes: `turns/sleep_seconds` + `turns/wake_seconds`, also seen on H200s; a second for
# each byte that it gives back and maps again.
SLEEP, SLEEP_BYTE = 0.04, 3.6e-12


@dataclass(frozen=True)
class Work:
    """What a round consists of.

    Attributes:
        samples: of a rollout; prompt, response: tokens of each; length: of a typical response.
    """

    samples: int
    prompt: int
    response: float
    rank: Rank
    shape: Shape


def work_of(args: Settings, shape: Shape, mean_response: float | None) -> Work | None:
    """None where no flag says how large a rollout is."""
    if args.rollout_batch_size is None:
        return None
    prompt, response = lengths(args, shape)
    samples = args.rollout_batch_size * args.n_samples_per_prompt * (2 if algorithm_of(args).name == "dpo" else 1)
    return Work(samples, prompt, min(response, mean_response or response), rank_of(args, shape), shape)


def predict(args: Settings, card: Card, mean_response: float | None = None) -> dict[str, float]:
    """Return seconds by phase; empty where the model or the size of a rollout is not known.

    Args:
        mean_response: tokens of a response, on average; None: all are as long as they may be.
    """
    shape = shape_of(args.hf_checkpoint)
    work = work_of(args, shape, mean_response) if shape is not None else None
    if work is None:
        return {}
    out = {} if args.command in OFFLINE else {"generate": generate_seconds(args, card, work)}
    passes = _passes(args)
    if passes:
        out["log-probs"] = passes * _pass_seconds(args, card, work, backward=False)
    out["train"] = train_seconds(args, card, work)
    if args.command not in OFFLINE:
        out["sync"] = sync_seconds(args, card, work)
    return out


def _passes(args: Settings) -> int:
    """Forward passes without gradients before the training: the old policy's, where it is not the current one, ..."""
    old = args.command not in OFFLINE and ((args.num_steps_per_rollout or 1) > 1 or bool(args.kl_coef))
    return old + uses_reference(args) + bool(args.opd_teacher_load)


# ---- training --------------------------------------------------------------------------------------------------------


def train_seconds(args: Settings, card: Card, work: Work) -> float:
    """Forward and backward passes of all micro-batches of a rank, and the optimizer's steps."""
    rank = work.rank
    read = 2 * gradients(rank) + 2 * (moments(rank) + masters(rank))  # a norm and a step read, a step writes
    step = read / card.memory
    if args.optimizer_cpu_offload:
        step += moments(rank) / min(card.to_host, card.to_device)
    return _pass_seconds(args, card, work, backward=True) + (args.num_steps_per_rollout or 1) * step


def _pass_seconds(args: Settings, card: Card, work: Work, *, backward: bool) -> float:
    s, rank = work.shape, work.rank
    length = work.prompt + work.response
    share = args.dp_size * rank.tp
    tokens = work.samples * length * (rank.tokens / rank.stream) / share
    flops = s.num_layers * tokens * layer_flops(s.hidden, s.ffn, s.queries, s.keys, int(length))
    rate = card.rate(card.train if backward else card.forward, s.hidden)
    on_gpu = args.device != "cpu"
    if rank.is_megatron:
        rate *= MEGATRON
    elif on_gpu and not rank.compiled:
        rate *= EAGER
    if backward:
        flops *= 4 if args.recompute_granularity == "full" else 3
    responses = work.samples * work.response / share
    again = 1 - kept_logits(rank) / max(rank.responses, 1)  # the share of logits that is computed again
    head = 2.0 * s.embedding * (3 + again if backward else 1) / card.matmul
    reads = (8 if rank.compiled and on_gpu else 20) * (2 if backward else 1) / 2  # of each logit, in bytes of `e`
    head += s.vocab * rank.e * reads / card.memory
    return flops / rate + (0.0 if s.value_head else responses * head)


# ---- generation ------------------------------------------------------------------------------------------------------


def generate_seconds(args: Settings, card: Card, work: Work) -> float:
    """Prefill and decode steps of an engine's share of a rollout, as many at a time as its KV cache holds."""
    engines = [engine for engine in plan_engines(args) if engine.update_weights and engine.role != "prefill"]
    s = work.shape
    if not engines:
        return 0.0
    spec = engines[0]
    planned = plan_engine(args, spec, s, args.gpu_memory_gb * 2**30)
    mine = -(-work.samples // len(engines))
    vllm = planned_kind(args).name == "vllm"
    most = max(1, min(mine, planned.requests) if vllm and args.device != "cpu" else mine)
    per_token = planned.cache / max(1, planned.tokens + BLOCK / 2)
    split = spec.parallel.tensor
    prompts = -(-mine // args.n_samples_per_prompt)
    flops = s.num_layers * layer_flops(s.hidden, s.ffn, s.queries, s.keys, work.prompt) / split
    prefill = prompts * work.prompt * flops / card.rate(card.forward, s.hidden)
    longest = 2 * work.response if work.response < lengths(args, s)[1] else work.response
    steps, seconds, tenth = longest, 0.0, longest / 10
    for part in range(10):  # of the steps: where lengths vary, evenly, fewer and fewer requests are left
        alive = 1.0 if steps == work.response else 1 - (part + 0.5) / 10
        context = work.prompt + (part + 0.5) * tenth
        active = max(1.0, most * alive)
        seconds += tenth * _decode_step(card, spec.flags, planned.weights, s, active, context, per_token, vllm)
    return prefill + seconds * max(1.0, mine / most)


def _decode_step(
    card: Card, flags: tuple[str, ...], weights: float, s: Shape, active: float, context: float, per_token: float,
    vllm: bool,
) -> float:  # fmt: skip
    moved = weights + active * context * per_token
    if not vllm:
        flops = 2.0 * s.used + 4.0 * s.num_layers * context * s.queries
        return s.num_layers * OPS * card.op + active * flops / card.rate(card.forward, s.hidden) + moved / card.memory
    fast = any(word.startswith("instep_engine.vllm.fast") for word in flags)
    host = FAST_STEP + active * FAST_REQUEST if fast else STOCK_STEP + active * STOCK_REQUEST
    return max(moved / (DECODE * card.memory), host)


# ---- sync ------------------------------------------------------------------------------------------------------------


def sync_seconds(args: Settings, card: Card, work: Work) -> float:
    """A session: the weights' way, its calls and its proof, and the moves of trainer and engines that take turns."""
    rank = work.rank
    size = float(rank.e * (rank.adapter or work.shape.total))
    way = planned_way(args)
    if way == SINGLE_COPY:
        moved = (4 + rank.e) * size / rank.e / card.memory
    elif way in ("ipc", "nccl", "lora_ipc"):
        moved = 6 * size / card.memory
    else:
        moved = size / (SHM if args.device != "cpu" else card.memory / 4)
    turns = 0.0
    if args.offload_train:
        parked = masters(rank) + (0.0 if args.optimizer_cpu_offload else moments(rank))
        turns += parked / card.to_host + parked / card.to_device
    if args.offload_rollout:
        sleeping = [engine for engine in plan_engines(args) if engine.sleeps]
        planned = (plan_engine(args, engine, work.shape, args.gpu_memory_gb * 2**30) for engine in sleeping)
        turns += max(
            (SLEEP + SLEEP_BYTE * (engine.weights + max(0.0, engine.cache)) for engine in planned), default=0.0
        )
    return SESSION + moved + turns

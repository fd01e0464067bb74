"""The seconds of a step by phase, from rooflines: FLOP and bytes over the rates of a measured card profile.

The host's extra work (vLLM's scheduler, JSON answers, calls of a session) does not depend on the card. Its constants
were measured on hosts with one H100. `docs/plan.md` shows the measurements; tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass

from instep.algorithms.catalog import OFFLINE, algorithm_of, uses_reference
from instep.arguments.settings import Settings
from instep.cluster.engine_plan import plan_engines, planned_way
from instep.engines.backend_choice import planned_kind
from instep.models.sizes import Shape, shape_of
from instep.preflight.plan.card import Card
from instep.preflight.plan.engine import BLOCK, plan_engine
from instep.preflight.plan.linear import layers_flops
from instep.preflight.plan.place import memory_of
from instep.preflight.plan.trainer import Rank, gradients, kept_logits, lengths, masters, moments, rank_of
from instep.weights.way import SINGLE_COPY

# Measured on H100s with 16 cores.
EAGER = 0.5  # of the rate of compiled layers
MEGATRON = 0.94  # of the rate of hf's compiled layers (`benchmarks/results/train-step-h100.json`)
DECODE = 0.65  # of a copy's bytes per second, in a decode step of vLLM
FAST_STEP, FAST_REQUEST = 3.4e-3, 9e-6  # host seconds of a decode step of vLLM, with instep's fast log-probs
STOCK_STEP, STOCK_REQUEST = 3.4e-3, 62e-6  # and with vLLM's own log-probs, which are sent as JSON
OPS = 45  # operations per layer of a decode step in the embedded engine
SESSION = 0.13  # seconds of a session's calls and proof
SHM = 0.85e9  # bytes per second from the trainer's GPU through shared memory and two digests to the engine's GPU
# Sleep and wake of an engine: `turns/sleep_seconds` + `turns/wake_seconds`, also measured on H200s. A constant, and
# seconds per byte that is freed and mapped again.
SLEEP, SLEEP_BYTE = 0.04, 3.6e-12


@dataclass(frozen=True)
class Work:
    """What a round consists of.

    Attributes:
        samples: samples of a rollout. prompt, response: tokens of each sample; response is an average.
    """

    samples: int
    prompt: int
    response: float
    rank: Rank
    shape: Shape


def work_of(args: Settings, shape: Shape, mean_response: float | None) -> Work | None:
    """Return the work of a round; None if no flag gives the size of a rollout."""
    if args.rollout_batch_size is None:
        return None
    prompt, response = lengths(args, shape)
    samples = args.rollout_batch_size * args.n_samples_per_prompt * (2 if algorithm_of(args).name == "dpo" else 1)
    return Work(samples, prompt, min(response, mean_response or response), rank_of(args, shape), shape)


def predict(args: Settings, card: Card, mean_response: float | None = None) -> dict[str, float]:
    """Return the seconds by phase; empty if the model or the size of a rollout is not known.

    Args:
        mean_response: average tokens of a response. None: all responses have the maximum length.
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


def step_seconds(args: Settings, seconds: dict[str, float]) -> float:
    """Return the seconds of a step. In `train-async` engines generate while the trainer works."""
    others = sum(seconds.values()) - seconds.get("generate", 0.0)
    return max(seconds["generate"], others) if args.command == "train-async" else sum(seconds.values())


def _passes(args: Settings) -> int:
    """Return the forward passes before the training: of old policy (if it differs), reference and teacher."""
    old = args.command not in OFFLINE and ((args.num_steps_per_rollout or 1) > 1 or bool(args.kl_coef))
    return old + uses_reference(args) + bool(args.opd_teacher_load)


# ---- training --------------------------------------------------------------------------------------------------------


def train_seconds(args: Settings, card: Card, work: Work) -> float:
    """Return the seconds of all forward and backward passes of a rank, and of the optimizer's steps."""
    rank = work.rank
    read = 2 * gradients(rank) + 2 * (moments(rank) + masters(rank))  # read by norm and step, written by the step
    step = read / card.memory
    if args.optimizer_cpu_offload:
        step += moments(rank) / min(card.to_host, card.to_device)
    return _pass_seconds(args, card, work, backward=True) + (args.num_steps_per_rollout or 1) * step


def _pass_seconds(args: Settings, card: Card, work: Work, *, backward: bool) -> float:
    s, rank = work.shape, work.rank
    length = work.prompt + work.response
    share = args.dp_size * rank.tp
    tokens = work.samples * length * (rank.tokens / rank.stream) / share
    flops = tokens * layers_flops(s, int(length))
    rate = card.rate(card.train if backward else card.forward, s.hidden)
    on_gpu = args.device != "cpu"
    if rank.is_megatron:
        rate *= MEGATRON
    elif on_gpu and not rank.compiled:
        rate *= EAGER
    if backward:
        flops *= 4 if args.recompute_granularity == "full" else 3
    responses = work.samples * work.response / share
    again = 1 - kept_logits(rank) / max(rank.responses, 1)  # the share of logits that is recomputed
    head = 2.0 * s.embedding * (3 + again if backward else 1) / card.matmul
    reads = (8 if rank.compiled and on_gpu else 20) * (2 if backward else 1) / 2  # of each logit, in bytes of `e`
    head += s.vocab * rank.e * reads / card.memory
    return flops / rate + (0.0 if s.value_head else responses * head)


# ---- generation ------------------------------------------------------------------------------------------------------


def generate_seconds(args: Settings, card: Card, work: Work) -> float:
    """Return the seconds of an engine's prefill and decode steps. Its KV cache limits the requests at a time."""
    engines = [engine for engine in plan_engines(args) if engine.update_weights and engine.role != "prefill"]
    s = work.shape
    if not engines:
        return 0.0
    spec = engines[0]
    planned = plan_engine(args, spec, s, memory_of(args))
    mine = -(-work.samples // len(engines))
    vllm = planned_kind(args).name == "vllm"
    most = max(1, min(mine, planned.requests) if vllm and args.device != "cpu" else mine)
    per_token = planned.cache / max(1, planned.tokens + BLOCK / 2)
    split = spec.parallel.tensor
    prompts = -(-mine // args.n_samples_per_prompt)
    flops = layers_flops(s, work.prompt) / split
    prefill = prompts * work.prompt * flops / card.rate(card.forward, s.hidden)
    longest = 2 * work.response if work.response < lengths(args, s)[1] else work.response
    steps, seconds, tenth = longest, 0.0, longest / 10
    for part in range(10):  # tenths of the steps; if lengths vary (uniformly), fewer requests are left in each
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
        flops = 2.0 * s.used + 4.0 * s.attending * context * s.queries
        return s.num_layers * OPS * card.op + active * flops / card.rate(card.forward, s.hidden) + moved / card.memory
    fast = any(word.startswith("instep_engine.vllm.fast") for word in flags)
    host = FAST_STEP + active * FAST_REQUEST if fast else STOCK_STEP + active * STOCK_REQUEST
    return max(moved / (DECODE * card.memory), host)


# ---- sync ------------------------------------------------------------------------------------------------------------


def sync_seconds(args: Settings, card: Card, work: Work) -> float:
    """Return the seconds of a sync: weights, calls and proof, and the moves if trainer and engines take turns."""
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
        planned = (plan_engine(args, engine, work.shape, memory_of(args)) for engine in sleeping)
        moves = (SLEEP + SLEEP_BYTE * (engine.weights + max(0.0, engine.cache)) for engine in planned)
        turns += max(moves, default=0.0)
    return SESSION + moved + turns

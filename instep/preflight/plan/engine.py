"""The memory of one GPU of an engine: weights, work, and the tokens of its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.arguments.settings import Settings
from instep.engines.backend_choice import planned_kind
from instep.engines.dialect import SGLANG
from instep.engines.kind import rollout_samples
from instep.engines.spec import EngineSpec
from instep.engines.topology import num_tokens
from instep.models.sizes import Shape, quantized_bytes
from instep.preflight.plan.place import CONTEXT, GB, of_process
from instep.preflight.plan.trainer import PHASES, Item, lengths
from instep.weights.way import RESTART

GRAPHS = 0.3 * GB  # CUDA graphs of all batch sizes, beyond CONTEXT
BLOCK = 16  # tokens of a block of the KV cache
VLLM_FRACTION, SGLANG_FRACTION = 0.9, 0.88  # of a card, by default; SGLang's is of weights and KV cache alone
LARGE_CARD = 70 * 2**30  # bytes
VLLM_TOKENS, VLLM_REQUESTS = 8192, 1024  # of a step, on a large card
SMALL_TOKENS, SMALL_REQUESTS = 2048, 256  # on a smaller one
EMBEDDED_REQUESTS = 256
HOST = 4 * GB  # host memory of vLLM's processes beside a GPU, besides


@dataclass(frozen=True)
class EnginePlan:
    """The plan for one GPU of an engine.

    Attributes:
        work: activations, logits, CUDA graphs and context.
        cache: bytes of the KV cache. tokens: what it holds, over all GPUs of the engine that share a model.
        requests: how many requests of maximum length it holds at once. longest: tokens of such a request.
            per_request: its bytes on this GPU.
        host: bytes of its processes on the host.
    """

    spec: EngineSpec
    weights: float
    work: float
    cache: float
    tokens: int
    requests: int
    longest: int
    per_request: float
    host: float

    def items(self) -> list[Item]:
        who, sleeps = self.spec.name, self.spec.sleeps
        awake = PHASES if not sleeps else ("rollout",)
        weights = dict.fromkeys((*awake, "sync"), self.weights)
        rest = dict.fromkeys(PHASES, CONTEXT if sleeps else self.work) | {"rollout": self.work}
        return [
            Item(who, "weights", weights),
            Item(who, "KV cache", dict.fromkeys(awake, max(0.0, self.cache))),
            Item(who, "work, graphs, process", rest, self.host),
        ]


def plan_engine(args: Settings, spec: EngineSpec, shape: Shape, card: float) -> EnginePlan:
    """Return the plan of each GPU of the engine; a GPU has `card` bytes."""
    words = {**spec.words, **spec.own}
    e = 4 if args.precision == "fp32" else 2
    whole = planned_kind(args).dequantizes or args.weight_sync == RESTART  # restart: engines load exports
    weights = _weights(spec, shape, 1 if "quantization" in words else e, None if whole else quantized_bytes(spec.path))
    stream = 1 if _last(words, "kv_cache_dtype", "auto").startswith("fp8") else e
    heads = max(1, shape.kv_heads // spec.parallel.tensor)
    per_token = shape.attending / spec.parallel.pipeline * (shape.cached or 2 * heads * shape.head_dim) * stream
    state = 4.0 * shape.state / spec.parallel.tensor / spec.parallel.pipeline  # in float32
    prompt, response = lengths(args, shape)
    longest, (context, host) = prompt + response, of_process(args)
    host += HOST if args.device != "cpu" else 0.0
    if planned_kind(args).name == "sglang":
        most = VLLM_REQUESTS if card >= LARGE_CARD else SMALL_REQUESTS
        requests = int(_last(words, "max_running_requests", most))
        work = context + GRAPHS + requests * shape.vocab * 8.0
        cache = float(_last(words, "mem_fraction_static", SGLANG_FRACTION)) * card - weights
        if limit := num_tokens(_last(words, "max_total_tokens", ""), SGLANG.units):
            cache = min(cache, limit * per_token)
    elif planned_kind(args).name != "vllm":
        most = num_tokens(_last(words, "max_num_seqs", EMBEDDED_REQUESTS)) or EMBEDDED_REQUESTS
        at_once = min(rollout_samples(args), most)
        cache = at_once * (longest * per_token + state)
        work = context + at_once * shape.vocab * 8.0
    else:
        large = card >= LARGE_CARD
        most_tokens, most = (VLLM_TOKENS, VLLM_REQUESTS) if large else (SMALL_TOKENS, SMALL_REQUESTS)
        tokens = num_tokens(_last(words, "max_num_batched_tokens", most_tokens)) or most_tokens
        requests = num_tokens(_last(words, "max_num_seqs", most)) or most
        given = num_tokens(_last(words, "kv_cache_memory_bytes", ""))
        if given and args.rollout_batch_size:  # else vLLM reserves logits for its maximum number of requests
            requests = min(requests, rollout_samples(args))
        activations = tokens * e * (4 * shape.hidden + 3 * shape.ffn / spec.parallel.tensor)
        work = context + (0 if "enforce_eager" in words else GRAPHS) + activations + requests * shape.vocab * 8.0
        fraction = float(_last(words, "gpu_memory_utilization", VLLM_FRACTION))
        cache = float(given) if given else fraction * card - weights - work
    rows = -(-longest // BLOCK) * BLOCK
    requests = max(0, int(cache / (rows * per_token + state)))
    held = max(0, int((cache - requests * state) / per_token)) // BLOCK * BLOCK
    return EnginePlan(spec, weights, work, cache, held, requests, longest, longest * per_token + state, host)


def _weights(spec: EngineSpec, shape: Shape, per_number: float, stored: int | None) -> float:
    """Return bytes on one GPU. All GPUs of a stage share the experts. `stored`: bytes of a quantized model."""
    p = spec.parallel
    per_number = per_number if stored is None else stored / shape.total
    spread = max(p.expert, p.tensor * p.data)
    return per_number * ((shape.total - shape.experts) / p.tensor + shape.experts / spread) / p.pipeline


def _last(words: dict[str, list[str]] | dict[str, Sequence[str]], name: str, default: object) -> str:
    return str(words[name][-1] if name in words else default)

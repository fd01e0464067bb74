"""The memory of one trainer rank by item: what it holds, and the peak of forward and backward passes.

Bytes per token and layer are those of the tensors that autograd keeps; `tests/unit/test_plan_activations.py` counts
them in the models. `e` is the bytes of an element in computations: 2 in bf16, 4 in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import Settings
from instep.cluster.engine_plan import planned_way
from instep.models.sizes import Shape
from instep.models.stages import num_chunks, stage_layers
from instep.preflight.plan.linear import kept_by_mixers
from instep.preflight.plan.place import memory_of, of_process
from instep.training.hf.own_copy import has_room
from instep.weights.way import SINGLE_COPY

LIBRARIES, BUCKETS, PARKED = "process, libraries", "sync buckets", "parked, offloaded"  # items
PHASES = ("rollout", "log-probs", "training", "sync")
HEAD_LOGITS = 2**28  # logits of a chunk, as in both train backends
_COPIES = 0.25  # bytes per logit of a chunk for the logits that exist in float32 at a time
PROMPT = 1024  # tokens of a prompt, if no flag limits prompts


@dataclass(frozen=True)
class Item:
    """Bytes that one owner needs for one purpose.

    Attributes:
        gpu: bytes by phase; 0 for a missing phase.
    """

    owner: str
    name: str
    gpu: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0


@dataclass(frozen=True)
class Rank:
    """What determines the memory of a rank.

    Attributes:
        stream: tokens of a micro-batch. responses: the scored tokens among them.
        tokens: the computed tokens: `hf` computes the common prefix of a group's samples once.
        role: actor or critic.
        viewed: whether an engine on its GPU can share weights in this rank's split (`--weight-sync single-copy`).
    """

    args: Settings
    shape: Shape
    stream: int
    tokens: int
    responses: int
    role: str = "actor"
    viewed: bool = True

    @property
    def e(self) -> int:
        return 4 if self.args.precision == "fp32" else 2

    @property
    def tp(self) -> int:
        return self.args.tensor_model_parallel_size

    @property
    def is_megatron(self) -> bool:
        return self.args.train_backend == "megatron"

    @property
    def compiled(self) -> bool:
        """Whether layers run as fused code, which keeps no intermediate results of norms, rotations and gates."""
        return self.is_megatron or (self.tp == 1 and self.args.device != "cpu" and not self.args.no_torch_compile)

    @property
    def pieces(self) -> int:
        """The number of ranks that share the stored weights."""
        return self.tp * self.args.pipeline_model_parallel_size if self.is_megatron else self._world

    @property
    def _world(self) -> int:
        args = self.args
        if self.role == "actor":
            return args.world_size
        nodes = args.critic_num_nodes or args.actor_num_nodes
        return int(nodes * (args.critic_num_gpus_per_node or args.actor_num_gpus_per_node))

    @property
    def state_pieces(self) -> int:
        """The number of ranks that share masters and moments."""
        return self._world if self.is_megatron and self.args.use_distributed_optimizer else self.pieces

    @property
    def mirrors(self) -> bool:
        """Whether it computes with a second model. If `viewed`, its parameters are those of an engine."""
        return self.args.weight_sync == SINGLE_COPY and self.role == "actor" and not self.is_megatron

    @property
    def copies(self) -> bool:
        """Whether it computes with its own second model."""
        may = not self.is_megatron and self.tp == 1 and self.e == 2 and not self.mirrors and not self.adapter
        return may and has_room(self.args, self.shape.total, memory_of(self.args), self._world)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers layers from shards, or converts fp32 to bf16."""
        casts = self.e == 2 and not self.adapter
        return not (self.is_megatron or self.mirrors or self.copies) and (self._world > 1 or casts)

    @property
    def adapter(self) -> int:
        """Parameters of the adapter; 0 if all weights are trained."""
        if not self.args.lora_rank or self.role != "actor":
            return 0
        return round(self.args.lora_rank * self.shape.factors(self.args.lora_target_modules))

    @property
    def selects(self) -> bool:
        """Whether names select the trained weights. Their number is not known here."""
        args = self.args
        return self.role == "actor" and bool(args.only_train_params_name_list or args.freeze_params_name_list)

    def held(self, shape: Shape) -> float:
        """Return the parameters of a model on this rank. Megatron splits experts differently from other weights."""
        if not self.is_megatron:
            return shape.total / self.pieces
        stages = self.args.pipeline_model_parallel_size
        return ((shape.total - shape.experts) / self.tp + shape.experts / self._expert_pieces) / stages

    @property
    def routed(self) -> float:
        """Total width of a token's copies for the experts of this rank, per layer; the mean over tokens."""
        shared = (self.args.expert_tensor_parallel_size or self.tp) / self.tp if self.is_megatron and self.tp > 1 else 1
        return self.shape.routed * self.shape.hidden * shared

    @property
    def stacked(self) -> float:
        """Parameters of a layer's experts in the larger of the two products that stack them."""
        if not self.is_megatron or not self.args.moe_grouped_gemm:
            return 0.0
        return 2 / 3 * self.shape.experts / self.shape.num_layers / self._expert_pieces

    @property
    def _expert_pieces(self) -> int:
        """The number of ranks of a stage that share its experts."""
        return self.args.expert_model_parallel_size * (self.args.expert_tensor_parallel_size or self.tp)

    def in_stage(self) -> float:
        """Return the parameters on one of Megatron's ranks, in the largest pipeline stage."""
        s, stages = self.shape, self.args.pipeline_model_parallel_size
        *others, last = stage_layers(self.args, s.num_layers - s.mtp)
        layers = max([*others, last + s.mtp])
        ends = s.outside if stages == 1 else max(s.embedding, s.outside / 2)  # of the first or the last
        dense = layers * (s.layer - s.experts / s.num_layers) + ends
        return dense / self.tp + s.experts * layers / s.num_layers / self._expert_pieces

    @property
    def trained(self) -> float:
        """Parameters with a gradient on this rank."""
        args, stages = self.args, self.args.pipeline_model_parallel_size
        if self.adapter and self.is_megatron:  # A or B of a layer is whole on each rank
            return args.lora_rank * self.shape.factors(args.lora_target_modules, self.tp, self._expert_pieces) / stages
        return 0.0 if self.selects else self.adapter / self.pieces if self.adapter else self.held(self.shape)

    @property
    def states(self) -> float:
        """Parameters with masters and moments on this rank."""
        if self.selects or self.state_pieces == self.pieces:
            return self.trained
        return (self.trained * self.pieces if self.adapter else self.shape.total) / self.state_pieces


def lengths(args: Settings, shape: Shape) -> tuple[int, int]:
    """Return the tokens of the longest prompt and response, from the flags or defaults. In SFT a whole conversation
    may be trained on, so it counts as a response; --rollout-max-prompt-len limits it."""
    most = shape.context
    context = min(most, args.rollout_max_context_len or most, args.vllm_max_model_len or most)
    if args.command == "sft":
        return 0, min(args.rollout_max_prompt_len or PROMPT, context)
    response = min(args.rollout_max_response_len or PROMPT, context)
    prompt = args.rollout_max_prompt_len
    if prompt is None or prompt >= context - 1:  # a limit from the context says nothing about prompts
        prompt = PROMPT
    return max(1, min(prompt, context - response)), response


def rank_of(args: Settings, shape: Shape, role: str = "actor", *, shares: bool = True, viewed: bool = True) -> Rank:
    """Return a rank with its largest micro-batch. Without `shares`, samples have no common prefix."""
    prompt, response = lengths(args, shape)
    longest = prompt + response
    members = 2 if algorithm_of(args).name == "dpo" else 1  # samples that always share a micro-batch
    cp = args.context_parallel_size  # ranks that share each sample's tokens
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        samples = max(1, args.max_tokens_per_gpu * cp // (longest * members)) * members
        stream = max(args.max_tokens_per_gpu, -(-longest * members // cp))
    else:
        samples = args.micro_batch_size * members
        stream = -(-samples * longest // cp)
    tokens, group = stream, max(members, args.n_samples_per_prompt)
    if shares and args.train_backend == "hf" and group > 1:
        prompts = min(samples, -(-samples // group) + 1)  # the first and the last group may be incomplete
        computed = samples * response + prompts * prompt
        tokens = min(stream, computed * stream // (samples * longest))
    responses = stream * response // longest
    shape = shape.as_critic() if role == "critic" else shape.with_mtp(args.mtp_num_layers)
    return Rank(args, shape, stream, tokens, responses, role, viewed)


# ---- activations -----------------------------------------------------------------------------------------------------


def kept_in_layer(r: Rank, recompute: str | None, *, largest: bool = False) -> float:
    """Return the bytes per token that a layer keeps for its backward pass, the mean over layers or the `largest`."""
    s, e, tp = r.shape, r.e, r.tp
    h = s.hidden / (tp if r.args.sequence_parallel else 1)
    q, k, f, norm = s.queries / tp, s.keys / tp, s.ffn / tp, int(s.qk_norm)
    sums, where = 4 * s.heads / tp, {"cuda": r.args.device == "cuda", "largest": largest}  # of attention's softmax
    if recompute == "full":
        return e * h
    if recompute == "selective" and not r.is_megatron:  # products and attention
        return e * (3 * h + 2 * q + 2 * k + 2 * f) + sums
    copies = e * r.routed * (1 if r.is_megatron else 2)  # inputs of experts; in `hf` also their weighted outputs
    if r.compiled:  # x and its norm twice; projection, rotation (and norm); attention's output; gate, up and product
        return e * (4 * h + 3 * f) + kept_by_mixers(s, e, tp, e * (2 + norm) * (q + k) + sums, **where) + copies
    scales = 4 * (2 + norm * (s.heads + s.kv_heads) / tp)
    norms = norm * (q + k) * (4 + e)  # x in fp32, normed, times the weight
    attention = kept_by_mixers(s, e, tp, norms + 2 * e * (q + k) + sums + scales, **where)
    kept = 2 * h * (4 + 2 * e) + attention + 4 * e * f + copies
    return kept - (2 * h + norm * (q + k)) * e * bool(r.adapter)


def kept(r: Rank) -> float:
    """Return the bytes that all layers keep for the backward pass of a micro-batch."""
    s, args = r.shape, r.args
    layer = kept_in_layer(r, args.recompute_granularity)
    groups = s.num_layers
    if args.recompute_granularity == "full" and r.is_megatron:
        per_group = args.recompute_num_layers or 1
        if args.recompute_method == "block":  # this many layers of each stage
            again = min(groups, per_group * args.pipeline_model_parallel_size)
            layers = r.tokens * (again * layer + (groups - again) * kept_in_layer(r, None))
            return _interleaved(r) * layers + _ends(r)
        groups = -(-groups // per_group)
    layers = groups * (r.tokens * layer + _copied(r, args.recompute_granularity))
    return _interleaved(r) * layers + _ends(r)


def _interleaved(r: Rank) -> float:
    """Return the factor of memory for virtual pipeline stages, which start more micro-batches."""
    if not r.is_megatron:
        return 1.0
    stages = r.args.pipeline_model_parallel_size
    chunks = max(1, num_chunks(r.args, r.shape.num_layers - r.shape.mtp))
    return 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0


def _copied(r: Rank, recompute: str | None) -> float:
    """Return bytes per layer of copied keys and values: attention needs them for every sample."""
    return 0.0 if recompute else 2.0 * r.e * r.shape.keys / r.tp * (r.stream - r.tokens)


def _ends(r: Rank) -> float:
    """Return the bytes of the last norm, the scored hidden states and the kept logits."""
    hidden = r.tokens * r.shape.hidden * (4 + r.e) + r.responses * r.shape.hidden * r.e
    heads = 0 if r.shape.value_head else 1 + r.shape.mtp  # each draft of multi-token prediction keeps its own
    return hidden + heads * kept_logits(r) * (r.shape.vocab / r.tp) * r.e


def kept_logits(r: Rank) -> int:
    """Return the response tokens whose logits are kept for the backward pass; see `log_probs.in_chunks`."""
    more = 1.0 if r.args.device == "cpu" else max(1.0, r.args.gpu_memory_gb / 32)
    kept, chunk = int(8 * HEAD_LOGITS * more) * r.tp // (r.e * r.shape.vocab), _chunk(r)
    return r.responses if r.responses <= max(chunk, kept) else max(chunk, kept // chunk * chunk)


def _chunk(r: Rank) -> int:
    return max(1, HEAD_LOGITS * r.tp * 15 // (16 * r.shape.vocab))  # `log_probs.in_chunks`


def _chunk_bytes(r: Rank, per_logit: float) -> float:
    return min(r.responses, _chunk(r)) * (r.shape.vocab / r.tp) * per_logit


def _head_work(r: Rank) -> float:
    """Return the bytes of a chunk's logits and gradient while it is computed, without those in `_ends`."""
    if r.shape.value_head:
        return 4.0 * r.responses * r.shape.hidden
    return _chunk_bytes(r, (2 if kept_logits(r) < r.responses else 1) * r.e + _COPIES)


def work(r: Rank) -> float:
    """Return the peak bytes of a backward pass besides the kept ones: at the output layer or in a layer."""
    s, e = r.shape, r.e
    head_grad = e * s.embedding / r.tp if not r.shape.value_head and not r.adapter else 0.0
    h, f = s.hidden, s.ffn / r.tp
    # The peak is in the gradient of gate times up; with experts, when tokens return to their positions.
    layer = r.tokens * e * (2 * f + 2 * h + 2 * r.routed) + e * r.stacked
    if r.args.recompute_granularity is not None:
        again = kept_in_layer(r, None, largest=True) - kept_in_layer(r, r.args.recompute_granularity)
        layer += r.tokens * again + _copied(r, None)
    if r.gathers and not r.adapter:  # a layer's gradient in both types, before it becomes a shard
        layer += s.layer * (e + 4)
    return head_grad + max(_head_work(r) + head_grad, layer)


def forward_work(r: Rank) -> float:
    """Return the peak bytes of a forward pass without gradients."""
    s, e = r.shape, r.e
    layer = r.tokens * e * (2 * s.hidden + 3 * s.ffn / r.tp + 2 * r.routed) + e * r.stacked
    logits = 0.0 if s.value_head else _chunk_bytes(r, e + _COPIES)
    return max(layer, r.tokens * s.hidden * (4 + e) + logits)


# ---- states ----------------------------------------------------------------------------------------------------------


def weights(r: Rank) -> float:
    """Return the bytes of weights in the compute dtype: a copy, a frozen base, or what FSDP2 gathers."""
    s, e = r.shape, r.e
    if r.mirrors:
        return 0.0 if r.viewed else e * s.total / r.tp
    if r.is_megatron:
        return e * r.in_stage()
    if r.copies:
        return e * float(s.total)
    gathered = e * (s.outside + 2 * s.layer) / r.tp if r.gathers else 0.0
    return gathered + (e * s.total / r.pieces if r.adapter or e == 4 else 0.0)


def masters(r: Rank) -> float:
    if r.adapter:
        return 4.0 * r.trained
    if r.e == 4 and (not r.mirrors or (r.args.device == "cpu" and r._world == 1)):  # or those of the engine
        return 0.0
    return 4.0 * (r.states if r.is_megatron else r.held(r.shape))  # hf has all weights in fp32, also frozen ones


def gradients(r: Rank) -> float:
    if (r.mirrors or r.copies) and not r.selects:
        return 4.0 * r.shape.total / r.tp  # whole on each rank, until the micro-batches of a step are summed
    return 4.0 * r.trained


def moments(r: Rank) -> float:
    per = 2.03 if r.args.optimizer == "adamw_8bit" else 8.0  # with a scale for each 256 numbers
    return per * r.states


def _buckets(r: Rank) -> float:
    """Return the bytes of the buckets from which weights are sent between GPUs. They stay allocated."""
    if r.role != "actor":
        return 0.0
    way, size = planned_way(r.args), 2.0 * r.args.update_weight_buffer_size
    return {"ipc": size, "nccl": size, "lora_ipc": min(size, 2.0 * r.e * r.adapter)}.get(way, 0.0)


def _gathered(r: Rank) -> float:
    """Return the bytes of the largest gathered weight in a sync."""
    if r.role != "actor" or r.adapter or (r.mirrors and r.pieces == 1):
        return 0.0
    if r.mirrors:  # with this rank's rows, which are sent
        return r.e * r.shape.embedding * (1 + r.tp / r.pieces)
    return (r.e + 4 * r.gathers) * r.shape.embedding


def frozen(r: Rank, shape: Shape, name: str) -> Item:
    """Return the item of a model that only scores. It is on the GPU while it scores; without offload, always."""
    size = r.e * r.held(shape)
    offloads = r.args.offload_train
    phases = ("log-probs",) if offloads else PHASES
    return Item(r.role, name, dict.fromkeys(phases, size), size if offloads else 0.0)


def items(r: Rank) -> list[Item]:
    """Return all items of a rank, except models that only score."""
    args, there = r.args, PHASES[1:] if r.args.offload_train else PHASES
    computes, offloads = PHASES[1:], args.offload_train
    on_host = bool(args.optimizer_cpu_offload)
    held: list[tuple[str, float, tuple[str, ...]]] = [
        ("weights", weights(r), computes if r.gathers else there),
        ("masters", masters(r), there),
        ("moments", 0.0 if on_host else moments(r), there),  # also in a sync: the copies to the host may still run
        ("gradients", gradients(r), ("log-probs", "training") if r.is_megatron else ("training",)),
        ("activations", kept(r), ("training",)),
    ]
    out = [Item(r.role, name, dict.fromkeys(phases, size)) for name, size, phases in held]
    out.append(Item(r.role, "work", {"log-probs": forward_work(r), "training": work(r), "sync": _gathered(r)}))
    out.append(Item(r.role, BUCKETS, dict.fromkeys(PHASES, _buckets(r))))
    context, process = of_process(args)
    out.append(Item(r.role, LIBRARIES, dict.fromkeys(PHASES, context), process))
    stored = masters(r) + (weights(r) if r.is_megatron or r.adapter or r.e == 4 else 0.0)
    host = (stored if offloads else 0.0) + (moments(r) if offloads or on_host else 0.0)
    return [*out, Item(r.role, PARKED, {}, host)]

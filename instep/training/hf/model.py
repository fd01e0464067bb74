"""A decoder-only `AutoModelForCausalLM` as a policy; docs/models.md lists the tested models."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import _config as symbolic_shapes
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoeModelOutputWithPast

from instep.checkpoints.hf_export import check_causal_lm
from instep.errors import ConfigError
from instep.models.attention import Unfit
from instep.models.checkpoint_names import decoder_layers
from instep.models.rope import fix_rope
from instep.models.shape import NUM_EXPERTS
from instep.training.hf.layout import ALONE, LAYOUTS, PACKED, Layout, body_of, own_errors, run_packed, run_rows
from instep.training.hf.linear_attention import pack_linear_attention
from instep.training.hf.tensor_parallel import TensorParallel
from instep.training.log_probs import in_chunks, log_probs_and_entropy, values
from instep.training.packed_attention import rows
from instep.training.packing import SharedPrefixes, within

_LOGIT_ELEMENTS = 2**28  # logits of a chunk, on a rank; they and their gradients need at most 2 GiB
_KEPT = [  # selective recomputation keeps slow results; norms, rotations and gates are computed again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.instep.packed_attention.default,
]
# Whether reductions along rows and along columns become one kernel must not depend on the number of tokens. Otherwise
# there are other kernels, and a compilation, on each side of several thresholds.
_COMPILED = {"triton.mix_order_reduction_non_strict_mode": True}


def _refuse(name: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError(
        f"{name} cannot be trained: {why}",
        where="train backend hf",
        remedy="use a decoder-only causal language model (Qwen2/3, Llama, ...; docs/models.md lists those that were "
        "tried)",
    ) from cause


class Policy(nn.Module):
    """The model. It computes log-probs only of response tokens, with the logits of one chunk of them at a time.

    `recompute` is None, "full" (the backward pass computes each layer again) or "selective" (except for its matrix
    products and attention). With `compiles`, the layers of packed samples run as compiled code, the same for any number
    and division of tokens.

    A critic (`value_head`) has an output layer of one row, and its outputs are values. The model is one root module, so
    FSDP2's hooks see one forward pass per micro-batch. `max_model_len` is that of the engines: see `models.rope`.

    Attributes:
        layout: how samples run; packed until `choose_layout` has chosen.
        remark: a line for the user if the layout is a slower one, otherwise empty.
        num_passes: see `layout.run_rows`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        recompute: str | None = None,
        value_head: bool = False,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        compiles: bool = False,
    ):
        super().__init__()
        check_causal_lm(config.to_dict(), where="hf_config")
        if value_head:
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
        self._not_packed = ""
        try:
            model = _build(config, PACKED.attention, dtype, trust_remote_code)
        except Unfit as error:
            self._not_packed = str(error)
            try:
                model = _build(config, ALONE.attention, dtype, trust_remote_code)
            except Unfit as error:
                remedy = "use a decoder-only transformers model"
                raise ConfigError(f"{config.model_type}: {error}", where="hf_config", remedy=remedy) from error
        self.value_head = value_head
        if value_head:
            width = model.get_output_embeddings().in_features
            model.set_output_embeddings(nn.Linear(width, 1, bias=False, dtype=dtype))
        model.tie_weights()
        fix_rope(model, max_model_len)
        pack_linear_attention(model)
        self.model: PreTrainedModel = model
        text = config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self._mixture = any(getattr(text, name, 0) for name in NUM_EXPERTS)
        self.layout = ALONE if self._not_packed else PACKED
        self.remark = ""
        self.num_passes: Callable[[int], int] = int
        self._own_head = False  # whether logits are more than the output embedding
        self.parallel: TensorParallel | None = None
        # Dropout stays off, in modules and in functions: the engine has none, and both must have the same distribution.
        self.model.eval()
        if recompute == "selective":  # the compiler must know what is kept
            _recompute_layers(self.model, context_fn=functools.partial(create_selective_checkpoint_contexts, _KEPT))
        if compiles:
            for layer in decoder_layers(self.model):
                layer.forward = torch.compile(layer.forward, dynamic=True, options=_COMPILED)
        if recompute == "full":  # transformers' own switch requires train()
            _recompute_layers(self.model)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Split the layers over the ranks of `mesh`, which has one dimension; see `TensorParallel`."""
        self.parallel = TensorParallel(self.model, mesh, head=not self.value_head)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        positions: Tensor,
        targets: Tensor,
        temperature: Tensor,
        with_entropy: bool,
        shared: SharedPrefixes | None = None,
        check: bool = False,
        with_logits: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Compute the fields of `TokenOutputs` for `targets`, as a tuple, which FSDP2 supports.

        Args:
            shared: common prefixes of samples run through the model once; only their keys and values are copied.
            check: run `choose_layout` first.
            with_logits: also return the logits of the whole stream, float32 `[1, num_tokens, V]`; not with `shared`.
        """
        if check:
            self.choose_layout(tokens.device)
        if not self.layout.packed:
            with torch.compiler.set_stance("force_eager"):  # otherwise each of its shapes would be compiled
                states = run_rows(self.model, tokens, cu_seqlens, self.layout.batched, self.num_passes)
        else:
            with symbolic_shapes.patch(use_duck_shape=False):  # sizes that are equal by chance stay independent
                states = run_packed(self.model, tokens, position_ids, cu_seqlens, max_seqlen, shared)
            positions = positions if shared is None else shared.copies[positions]
        if with_logits:
            logits = self._logits(states).float()
            return *self._score(rows(logits, positions), targets, temperature, with_entropy), logits[None]
        hidden = rows(states, positions)
        if self.value_head:
            return hidden.new_empty(0), None, None, values(hidden, self.model.get_output_embeddings().weight)
        ranks = self.parallel.size if self.parallel is not None and self.parallel.splits_vocabulary else 1
        return in_chunks(
            self._head, hidden, targets, temperature, with_entropy,
            num_logits=_LOGIT_ELEMENTS * ranks, vocab_size=self.vocab_size, plain=not self._own_head,
        )  # fmt: skip

    def _logits(self, states: Tensor) -> Tensor:
        """Return the model's logits of hidden states `[num_tokens, width]`, with the scale, cap, ... of its head."""
        if not self._own_head:
            logits: Tensor = self.model.get_output_embeddings()(states)
            return logits
        body = body_of(self.model)
        body.forward = lambda *args, **kwargs: MoeModelOutputWithPast(last_hidden_state=states[None])
        try:
            blank = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            logits = self.model(input_ids=blank, use_cache=False).logits
        finally:
            del body.forward
        return logits[0]

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._score(self._logits(hidden), targets, temperature, with_entropy)

    def _score(
        self, logits: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ranks = self.parallel
        return log_probs_and_entropy(
            logits,
            targets,
            temperature,
            vocab_size=self.vocab_size,
            tp_group=ranks.group if ranks is not None and ranks.splits_vocabulary else None,
            with_entropy=with_entropy,
        )

    # ---- the layout ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def choose_layout(self, device: torch.device) -> None:
        """Choose the first layout that gives the same hidden states as each sample alone in the model's own attention.

        Raises:
            ConfigError: the model is not causal, or its logits do not follow from its last hidden states.
        """
        name = type(self.model).__name__
        lengths = torch.tensor([3, 4] * 3, device=device)  # short, so that a leak reaches most tokens
        bounds = F.pad(lengths.cumsum(0), (1, 0)).int()
        tokens = torch.arange(3, 3 + 7 * int(bounds[-1]), 7, device=device) % self.vocab_size
        whole, changed = bounds[[0, -1]], tokens.clone()
        changed[-1] = (changed[-1] + 1) % self.vocab_size
        try:
            states, other = (self._states(ALONE, t, whole) for t in (tokens, changed))
            if _differ(states[:-1], other[:-1]):
                raise Unfit("a token's hidden states depend on tokens after it")
            if not self.value_head:
                self._check_head(tokens, states)
            expected = self._states(ALONE, tokens, bounds)
        except Unfit as error:
            if self.parallel is not None:
                self.parallel.refuse(str(error))
            _refuse(name, str(error), error)
        reasons = [self._not_packed] if self._not_packed else []
        for layout in LAYOUTS[2:] if self._not_packed else LAYOUTS:
            try:
                together = self._states(layout, tokens, bounds)
                last = bounds[-4:].tolist()  # of three segments, which a leak from those before would reach
                alone = [
                    self._states(layout, tokens[start:stop], bounds.new_tensor([0, stop - start]))
                    for start, stop in itertools.pairwise(last)
                ]
                if _differ(together[last[0] :], torch.cat(alone)):
                    raise Unfit("a segment's hidden states depend on other segments")
                if not _differ(together, expected, mixture=self._mixture):
                    break
                reasons.append("its hidden states differ from those of its own attention")
            except Unfit as error:
                reasons.append(str(error))
        self.remark = "" if layout.packed else f"{name} is trained {layout}, which is slower: {reasons[0]}"

    def _states(self, layout: Layout, tokens: Tensor, bounds: Tensor) -> Tensor:
        """Return the hidden states of a stream in `layout`, and keep this layout."""
        self.layout, self.model.config._attn_implementation = layout, layout.attention
        lengths = bounds.diff()
        with own_errors():
            if layout.packed:
                return run_packed(self.model, tokens, within(lengths), bounds, int(lengths.max()))
            return run_rows(self.model, tokens, bounds, layout.batched, int)

    def _check_head(self, tokens: Tensor, states: Tensor) -> None:
        with own_errors():
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
            self._own_head = False
            self._own_head = not torch.equal(self._logits(states).float(), logits)
            if self._own_head and _differ(self._logits(states), logits):
                raise Unfit("its logits do not follow from its last hidden states")


def _build(config: PretrainedConfig, attention: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    with own_errors(), no_init_weights():  # `load_hf` follows; untouched memory costs nothing
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def _differ(states: Tensor, expected: Tensor, *, mixture: bool = False) -> bool:
    """Return whether more than a quarter of the tokens `[num_tokens, width]` differ by more than rounding.

    A few may: near a tie, rounding sends a token to another expert of a mixture.

    Args:
        mixture: whether in 16 bits many tokens may be near a tie, for states of different kernels.
    """
    if not expected.isfinite().all():
        return False  # there is nothing to compare with; the first sync names such weights
    tolerance = 1e-3 if states.dtype is torch.float32 else 0.3 if mixture else 5e-2
    distance = (states.float() - expected.float()).abs().amax(-1)
    return not bool((distance > tolerance * expected.float().abs().max()).float().mean() <= 0.25)


def _recompute_layers(model: PreTrainedModel, **options: Any) -> None:
    """Make each layer keep only its inputs, and compute the rest again in the backward pass; names do not change.

    Args:
        options: of `torch.utils.checkpoint.checkpoint`; its `context_fn` may keep more.
    """
    layers = decoder_layers(model)
    if not layers:
        _refuse(type(model).__name__, "it has no layers to recompute: remove --recompute-granularity")
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **options)
    for layer in layers:
        layer.forward = functools.partial(again, layer.forward)

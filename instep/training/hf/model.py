"""A decoder-only `AutoModelForCausalLM` as a policy over packed sequences; docs/models.md lists what was tried."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from instep.checkpoints.hf_export import check_causal_lm
from instep.errors import ConfigError
from instep.models.rope import fix_rope
from instep.training.log_probs import log_probs_and_entropy, values
from instep.training.machine import is_of_the_machine
from instep.training.packed_attention import packed_attention, rows
from instep.training.packing import SharedPrefixes

ATTENTION = "instep_packed"
_LOGIT_ELEMENTS = 2**28  # float32 logits of a chunk: 1 GiB


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_cu_seqlens: Tensor | None = None,
    packed_max_seqlen: int = 0,
    packed_shared: SharedPrefixes | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # among them dropout, which the engine does not have either
) -> tuple[Tensor, None]:
    """An attention of transformers: `[1, heads, num_tokens, head_dim]` -> `[1, num_tokens, heads, head_dim]`."""
    windowed = sliding_window is not None and sliding_window < packed_max_seqlen
    if packed_cu_seqlens is None:
        _refuse(type(module).__name__, "its layers do not hand the packed segments on to their attention")
    if softcap is not None or s_aux is not None or windowed or attention_mask is not None:
        reason = f"softcap {softcap}, sinks {s_aux is not None}, sliding window {sliding_window}, "
        reason += f"a mask of its own {attention_mask is not None}"
        _refuse(type(module).__name__, f"its attention is not plain causal attention over packed segments ({reason})")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens, max_seqlen = packed_cu_seqlens, packed_max_seqlen
    out = packed_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, scale=scaling, shared=packed_shared)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def _refuse(name: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError(
        f"{name} cannot be trained packed: {why}",
        where="train backend hf",
        remedy="use a decoder-only model with plain causal attention (Qwen2/3, Llama, ...; docs/models.md lists those "
        "that were tried)",
    ) from cause


class Policy(nn.Module):
    """The model, which computes log-probs of response tokens only, with the logits of one chunk of them at a time.

    As a critic (`value_head`) its output layer has one row, and its outputs are values. It is one root module, so that
    FSDP2's hooks see one forward pass per micro-batch. `max_model_len` is that of the engines: see `models.rope`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        recompute: bool,
        value_head: bool = False,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
    ):
        super().__init__()
        check_causal_lm(config.to_dict(), where="hf_config")
        if value_head:
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
        with _own_errors(config.model_type):
            try:
                with no_init_weights():  # `load_hf` follows; untouched memory costs nothing
                    model = AutoModelForCausalLM.from_config(
                        config, attn_implementation=ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code
                    )
            except (ValueError, ImportError) as error:
                raise ConfigError(
                    str(error), where="hf_config", remedy="use a decoder-only model of transformers"
                ) from error
        self.value_head = value_head
        if value_head:
            width = model.get_output_embeddings().in_features
            model.set_output_embeddings(nn.Linear(width, 1, bias=False, dtype=dtype))
        model.tie_weights()
        fix_rope(model, max_model_len)
        self.model: PreTrainedModel = model
        self.vocab_size: int = config.get_text_config().vocab_size
        # Dropout stays off, in modules and in functions: the engine, whose distribution this must be, has none.
        self.model.eval()
        if recompute:  # transformers' own switch asks for train()
            _recompute_layers(self.model)

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
        """The fields of `TokenOutputs` for `targets`, as a tuple, which FSDP2 understands.

        Args:
            shared: common prefixes of samples run through the model once; only their keys and values are copied.
            check: run `check_packing` first.
            with_logits: also give the logits of the whole stream, float32 `[1, num_tokens, V]`; not with `shared`.
        """
        if check:
            self.check_packing(tokens.device)
        if shared is not None:
            tokens, position_ids = tokens[shared.kept], position_ids[shared.kept]
            positions = shared.copies[positions]
        kwargs = _inputs(tokens, position_ids, cu_seqlens, max_seqlen, shared)
        states = self.model.base_model(**kwargs).last_hidden_state
        if with_logits:
            logits = self.model.get_output_embeddings()(states).float()
            return *self._score(rows(logits[0], positions), targets, temperature, with_entropy), logits
        hidden = rows(states[0], positions)
        if self.value_head:
            return hidden.new_empty(0), None, None, values(hidden, self.model.get_output_embeddings().weight)
        chunk = max(1, _LOGIT_ELEMENTS // self.vocab_size)
        if hidden.shape[0] <= chunk:
            return self._head(hidden, targets, temperature, with_entropy)
        parts = [
            checkpoint(self._head, *inputs, with_entropy, use_reentrant=False)
            for inputs in zip(hidden.split(chunk), targets.split(chunk), temperature.split(chunk), strict=True)
        ]
        entropy = torch.cat([p[1] for p in parts]) if with_entropy else None
        return torch.cat([p[0] for p in parts]), entropy

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._score(self.model.get_output_embeddings()(hidden), targets, temperature, with_entropy)

    def _score(
        self, logits: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        size = self.vocab_size
        return log_probs_and_entropy(logits, targets, temperature, vocab_size=size, with_entropy=with_entropy)

    @torch.no_grad()
    def check_packing(self, device: torch.device) -> None:
        """Refuse a model whose logits are more than its output embedding, or that computes other states when packed.

        Two segments in one stream are compared with the second one alone in the model's own attention.

        Raises:
            ConfigError: e.g. logit soft-capping or scaling, ALiBi, state-space layers, an attention that is not causal.
        """
        name, first, length = type(self.model).__name__, 5, 11
        tokens = torch.arange(3, 3 + 7 * (first + length), 7, device=device) % self.vocab_size
        at = torch.arange(length, device=device)
        positions, bounds = torch.cat([at[:first], at]), at.new_tensor([0, first, first + length]).int()
        changed = tokens.clone()
        changed[-1] = (changed[-1] + 1) % self.vocab_size
        with _own_errors(name):
            inputs = _inputs(tokens, positions, bounds, length)
            hidden = self.model.base_model(**inputs).last_hidden_state
            logits = self.model(**inputs).logits
            other = self.model.base_model(**_inputs(changed, positions, bounds, length)).last_hidden_state
            config, alone = self.model.config, {"input_ids": tokens[None, first:], "position_ids": at[None]}
            config._attn_implementation = "eager"
            try:
                expected = self.model.base_model(**alone, use_cache=False).last_hidden_state
            finally:
                config._attn_implementation = ATTENTION
        if not torch.equal(self.model.get_output_embeddings()(hidden).float(), logits.float()):
            _refuse(name, "its logits are more than its output embedding (soft-capping, scaling or the like)")
        if _differ(hidden[0, :-1], other[0, :-1]):
            _refuse(name, "a token's hidden states depend on tokens after it (its attention is not causal when packed)")
        if _differ(hidden[0, first:], expected[0]):
            _refuse(name, "a segment's hidden states are not those that it has alone (ALiBi, state-space layers, ...)")


def _differ(states: Tensor, expected: Tensor) -> bool:
    """Whether more than a quarter of the tokens `[num_tokens, width]` differ by more than rounding.

    A few may: near a tie, rounding sends a token to another expert of a mixture.
    """
    tolerance = 1e-3 if states.dtype is torch.float32 else 5e-2
    distance = (states.float() - expected.float()).abs().amax(-1)
    return bool((distance > tolerance * expected.float().abs().max()).float().mean() > 0.25)


def _recompute_layers(model: PreTrainedModel) -> None:
    """Let each layer keep its inputs only, and compute the rest again in the backward pass; names stay as they are."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        _refuse(type(model).__name__, "it has no layers that could be recomputed: leave --recompute-granularity out")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def _own_errors(name: str) -> Iterator[None]:
    """Whatever a model of transformers raises that cannot be built or run in this way becomes one refusal."""
    try:
        yield
    except (ValueError, ImportError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if is_of_the_machine(error):
            raise
        why = f"transformers cannot run it in this way ({type(error).__name__}: {str(error)[:200]})"
        if ATTENTION in str(error):
            why = "its attention cannot be exchanged for one over packed segments"
        _refuse(name, why, error)


def _inputs(
    tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, shared: SharedPrefixes | None = None
) -> dict[str, Any]:
    return dict(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        use_cache=False,
        packed_cu_seqlens=cu_seqlens,
        packed_max_seqlen=max_seqlen,
        packed_shared=shared,
    )

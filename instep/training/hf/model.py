"""Any decoder-only `AutoModelForCausalLM` as a policy over packed sequences."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from instep.checkpoints.hf_export import check_causal_lm
from instep.errors import ConfigError
from instep.training.log_probs import log_probs_and_entropy, values
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
    if packed_cu_seqlens is None or softcap is not None or s_aux is not None or windowed:
        reason = f"softcap {softcap}, sinks {s_aux is not None}, sliding window {sliding_window}"
        _refuse(type(module).__name__, f"its attention is not plain causal attention over packed segments ({reason})")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens, max_seqlen = packed_cu_seqlens, packed_max_seqlen
    out = packed_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, scale=scaling, shared=packed_shared)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def _refuse(name: str, why: str) -> None:
    raise ConfigError(
        f"{name} cannot be trained packed: {why}",
        where="train backend hf",
        remedy="use a decoder-only model with plain causal attention, such as Qwen2, Qwen3 or Llama",
    )


class Policy(nn.Module):
    """The model, which computes log-probs of response tokens only, with the logits of one chunk of them at a time.

    As a critic (`value_head`) its output layer has one row, and its outputs are values. It is one root module, so that
    FSDP2's hooks see one forward pass per micro-batch.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        recompute: bool,
        value_head: bool = False,
        trust_remote_code: bool = False,
    ):
        super().__init__()
        check_causal_lm(config.to_dict(), where="hf_config")
        if value_head:
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
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
        self.model: PreTrainedModel = model
        self.vocab_size: int = config.get_text_config().vocab_size
        # Dropout stays off: the engine, whose distribution this must be, has none.
        self.model.eval()
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0

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
        """Refuse a model whose logits are more than its output embedding, or that sees across packed segments.

        Raises:
            ConfigError: e.g. logit soft-capping or scaling, state-space layers.
        """
        name, length = type(self.model).__name__, 8
        segment = torch.arange(length, device=device)
        inputs = _inputs(
            (segment % self.vocab_size).repeat(2), segment.repeat(2), segment.new_tensor([0, 8, 16]).int(), length
        )
        hidden = self.model.base_model(**inputs).last_hidden_state
        logits = self.model(**inputs).logits
        if not torch.equal(self.model.get_output_embeddings()(hidden).float(), logits.float()):
            _refuse(name, "its logits are more than its output embedding (soft-capping, scaling or the like)")
        first, second = hidden[0].float().split(length)
        tolerance = 1e-3 if hidden.dtype is torch.float32 else 5e-2
        if (first - second).abs().max() > tolerance * first.abs().max():
            _refuse(name, "a segment's hidden states depend on the segment before it (state-space layers, ALiBi, ...)")


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

"""A transformers decoder with a key/value cache of our own: one row per running request, rows kept dense.

The cache is one tensor `[layers, 2, rows, kv_heads, length, head_dim]` that grows by doubling. A prefill computes
causal attention among the new tokens alone and stores the keys and values; a decode step appends one position per row
and attends over the rows in use, up to the longest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel

from instep.errors import CheckpointError


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """No mask: a prefill, causal. A mask `[rows, 1, 1, length]`: a decode step of one query per row.

    In a decode step the query heads that share a key head are folded into the query axis: no copy of the cache.
    """
    rows, heads, num_queries, dim = query.shape
    if attention_mask is None:
        gqa = heads != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    else:
        query = query.reshape(rows, key.shape[1], -1, dim)
        mask = attention_mask.expand(-1, -1, query.shape[2], -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(rows, heads, num_queries, -1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("instep_embedded", _attention)


class RowCache(Cache):
    """See the module's docstring. `prefill` and `decode` say what the next forward pass stores where."""

    def __init__(self, config: Any, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        heads = config.num_attention_heads
        self.num_layers = config.num_hidden_layers
        self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.max_rows, self.max_length = max_rows, max_length
        self.data = torch.zeros(self._shape(0, 0), dtype=dtype, device=device)
        self.source: torch.Tensor | None = None
        self.first_row = self.num_rows = self.length = 0

    def _shape(self, rows: int, length: int) -> tuple[int, ...]:
        return self.num_layers, 2, rows, self.kv_heads, length, self.head_dim

    def _reserve(self, rows: int, length: int) -> None:
        old_rows, old_length = self.data.shape[2], self.data.shape[4]
        if rows <= old_rows and length <= old_length:
            return
        new_rows = old_rows if rows <= old_rows else min(self.max_rows, max(rows, 2 * old_rows, 8))
        new_length = old_length if length <= old_length else min(self.max_length, max(length, 2 * old_length, 64))
        # Zeros, because a masked position still multiplies its value by 0, and 0 * NaN is NaN.
        data = torch.zeros(self._shape(new_rows, new_length), dtype=self.data.dtype, device=self.data.device)
        data[:, :, :old_rows, :, :old_length] = self.data
        self.data = data

    def prefill(self, source: torch.Tensor, first_row: int, length: int) -> None:
        """Sequence `source[i]` of the batch goes to row `first_row + i`."""
        self._reserve(first_row + source.numel(), length)
        self.source, self.first_row = source, first_row

    def decode(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Row i gets position `positions[i]`; attention looks at `length` positions. Returns the additive mask."""
        self.source, self.num_rows = None, positions.numel()
        self._reserve(self.num_rows, length)
        self.length = min(-(-length // 16) * 16, self.data.shape[4])  # few shapes, aligned rows of the mask
        heads = torch.arange(self.num_rows * self.kv_heads, device=positions.device)
        self.where = heads * self.data.shape[4] + positions.repeat_interleave(self.kv_heads)
        unseen = torch.arange(self.length, device=positions.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=self.data.dtype, device=positions.device)
        return mask.masked_fill_(unseen, -torch.inf)[:, None, None]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.data[:, :, targets] = self.data[:, :, sources]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        states = (key_states, value_states)
        if self.source is not None:
            rows = slice(self.first_row, self.first_row + self.source.numel())
            for cache, new in zip(self.data[layer_idx], states, strict=True):
                cache[rows, :, : new.shape[2]] = new[self.source]
            return states
        for cache, new in zip(self.data[layer_idx], states, strict=True):
            cache.view(-1, self.head_dim).index_copy_(0, self.where, new.reshape(-1, self.head_dim))
        keys, values = self.data[layer_idx, :, : self.num_rows, :, : self.length]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # unused: positions and mask are given


def load_model(path: str, dtype: torch.dtype, device: torch.device, max_model_len: int) -> PreTrainedModel:
    """The causal model in `path`, in eval mode.

    Raises:
        CheckpointError: weights are missing, or its attention is of a kind that the cache does not hold.
    """
    config = AutoConfig.from_pretrained(path)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers != {"full_attention"} or (window is not None and window < max_model_len):
        what = f"attention other than full ({', '.join(sorted(layers))}, window {window}) is not supported"
        raise CheckpointError(what, where=path, remedy="use vLLM, or a model such as Qwen3, Qwen2 or Llama")
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="instep_embedded", output_loading_info=True
    )
    if info["missing_keys"]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(sorted(info['missing_keys'])[:3])}", where=path)
    return model.to(device).eval().requires_grad_(False)


class Runner:
    """Forward passes. The output head is applied to the positions that are needed, not to every prompt token."""

    def __init__(self, model: PreTrainedModel, max_rows: int, max_length: int):
        self.model, self.device = model, model.device
        self.cache = RowCache(model.config, max_rows, max_length, model.dtype, model.device)
        self.pick: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self.pick is None:
            return None
        return (args[0].reshape(1, -1, args[0].shape[-1])[:, self.pick], *args[1:])

    def prefill(
        self, sequences: Sequence[Sequence[int]], source: Sequence[int], first_row: int, scored: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Fill cache rows `first_row...` with sequence `source[i]` each.

        Returns float32 logits `[len(source), vocab]` after the last token of each row, and for each sequence in
        `scored` the logits `[length - 1, vocab]`, in the model's dtype, that predict its second to last token.
        """
        longest = max(map(len, sequences))
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device)
        positions = torch.arange(longest, device=self.device).expand_as(ids)
        pick = [i * longest + len(s) - 1 for i, s in enumerate(sequences)]
        for i in scored:
            pick.extend(range(i * longest, i * longest + len(sequences[i]) - 1))
        rows = torch.tensor(source, device=self.device)
        self.cache.prefill(rows, first_row, longest)
        self.pick = torch.tensor(pick, device=self.device)
        logits = self.model(ids, position_ids=positions, past_key_values=self.cache, use_cache=True).logits[0]
        self.pick = None
        prompts = logits[len(sequences) :].split([len(sequences[i]) - 1 for i in scored]) if scored else []
        return logits[rows].float(), list(prompts)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Append `tokens[i]` at `positions[i]` to row i; float32 logits `[batch, vocab]` of the next tokens."""
        mask = self.cache.decode(positions, length)
        out = self.model(
            tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits[:, -1].float()

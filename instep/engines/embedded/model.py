"""A transformers decoder with its own key/value cache. The cache has one row per running request and no gaps."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from instep.checkpoints.hf_export import read_hf_config
from instep.checkpoints.quantization import quantization_of
from instep.engines.embedded import delta_net
from instep.engines.embedded.protocol import Ranked
from instep.engines.embedded.sampling import log_softmax
from instep.errors import CheckpointError
from instep.models.attention import Unfit, check_plain
from instep.models.rope import fix_rope
from instep.models.routes import as_routes
from instep.models.shape import FAMILIES, Family
from instep.system.processes import pulse

KINDS = {"full_attention", "sliding_attention"}  # of layers, in `layer_types` of transformers


def _window(module: Any) -> int | None:
    """Return how many tokens a query of this layer attends to, with itself; None: all."""
    kinds = getattr(module.config, "layer_types", None)
    if kinds and kinds[module.layer_idx] == "full_attention":
        return None
    return getattr(module.config, "sliding_window", None)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **other: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention of a causal prefill (no mask), or of a decode step with one query per row.

    The mask of a decode step is `[rows, 1, 1, length]`. Its query heads that share a key head are folded into the query
    axis, which saves a copy of the cache.
    """
    pulse()
    check_plain(other)
    rows, heads, num_queries, dim = query.shape
    window, length = _window(module), key.shape[2]
    places = None if window is None or window >= length else torch.arange(length, device=key.device)
    if attention_mask is None:
        band = None
        if places is not None:
            back = places[:, None] - places
            band = (back >= 0) & (back < window)
        causal, gqa = band is None, heads != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, band, is_causal=causal, scale=scaling, enable_gqa=gqa)
    else:
        if places is not None:
            lengths = (attention_mask == 0).sum(-1, keepdim=True)
            attention_mask = attention_mask.masked_fill(lengths - places > window, -torch.inf)
        query = query.reshape(rows, key.shape[1], -1, dim)
        mask = attention_mask.expand(-1, -1, query.shape[2], -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, num_queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("instep_embedded", _attention)


def load_model(path: str, dtype: torch.dtype, device: torch.device, max_model_len: int, trust: bool) -> PreTrainedModel:
    """Return the causal model in `path`. Raises CheckpointError: it lacks weights, or has another attention."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    text = config.get_text_config()
    known = KINDS | ({delta_net.KIND} if FAMILIES.get(text.model_type, Family()).delta else set())
    if other := set(getattr(text, "layer_types", None) or known) - known:
        raise _unfit(path, f"it has layers of another kind ({', '.join(sorted(other))})")
    how = {"dtype": dtype, "attn_implementation": "instep_embedded", "trust_remote_code": trust}
    if quantization_of(read_hf_config(Path(path)), path) is not None:
        model, info = _dequantized(Path(path), config, how), {"missing_keys": ()}
    else:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **how)
    if info["missing_keys"]:
        what = f"the checkpoint lacks {sorted(info['missing_keys'])[:3]}"
        raise CheckpointError(what, where=path, remedy="copy or download the checkpoint again")
    fix_rope(model, max_model_len)
    model.to(device).eval().requires_grad_(False)
    try:
        model(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    except Unfit as error:
        raise _unfit(path, str(error)) from error
    return model


def _unfit(path: str, why: str) -> CheckpointError:
    what = f"the embedded engine cannot serve this model, because {why}"
    return CheckpointError(what, where=path, remedy="use --rollout-backend vllm")


def _dequantized(folder: Path, config: PretrainedConfig, how: dict[str, Any]) -> PreTrainedModel:
    """Return the model with dequantized weights, as the trainer reads them."""
    from instep.training.hf.weights import load_hf  # imports much that other models do not need

    vars(config).pop("quantization_config", None)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **how)
    load_hf(model, folder)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


class Recorder:
    """The experts that a model chose: the arguments in calls of the modules `...layers.N...experts`.

    Raises:
        ValueError: the model has no such module.
    """

    def __init__(self, model: PreTrainedModel):
        self.num_layers, self._noted = model.config.get_text_config().num_hidden_layers, dict[int, torch.Tensor]()
        for name, module in model.named_modules():
            if found := re.search(r"\blayers\.(\d+)\..*\bexperts$", name):
                module.register_forward_pre_hook(functools.partial(self._note, int(found[1])))
                self._noted[int(found[1])] = torch.empty(0)
        if not self._noted:
            raise ValueError("--enable-return-routed-experts: this model has no routed experts")

    def _note(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._noted[layer] = args[1]

    def rows(self) -> np.ndarray:
        """Return the experts of the last forward pass, `[num_tokens, num_layers, top_k]`; zeros in dense layers."""
        none = torch.zeros_like(next(iter(self._noted.values())))
        return as_routes(torch.stack([self._noted.get(i, none) for i in range(self.num_layers)], dim=1).cpu().numpy())


class Runner(delta_net.States):
    """Forward passes and the cache `data`, which grows by doubling.

    It holds keys and values, `[layers, rows, kv_heads, length, dim]` each, of layers with attention. For latent
    attention it holds the tensors that transformers caches instead.
    """

    def __init__(
        self, model: PreTrainedModel, max_rows: int, max_length: int, fixed: bool = False, records: bool = False
    ):
        """Create the cache.

        With `fixed` each decode step has all rows and the whole length, so that no row's bits depend on others. With
        `records` the experts of each token are noted.
        """
        config, heads = model.config, model.config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        super().__init__(model, kinds)
        self.recorder = Recorder(model) if records else None
        self.routes: list[np.ndarray] = []  # for each row of the last step, the experts of the tokens that it computed
        self.fixed = fixed
        self.prefill_tokens = 0 if fixed or self.states else 8192  # padded, per forward pass; padding changes states
        self.model, self.device, self.max_rows, self.max_length = model, model.device, max_rows, max_length
        self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dims = [getattr(config, "head_dim", None) or config.hidden_size // heads] * 2
        if getattr(config, "kv_lora_rank", None):
            one = DynamicCache(config=config)
            model(torch.zeros(1, 1, dtype=torch.long, device=self.device), past_key_values=one, use_cache=True)
            kept = [x for x in (one.layers[0].keys, one.layers[0].values) if x is not None]
            self.kv_heads, dims = kept[0].shape[1], [x.shape[3] for x in kept]
        self.place = {i: n for n, i in enumerate(i for i, kind in enumerate(kinds) if kind != delta_net.KIND)}
        shapes = [(len(self.place), 0, self.kv_heads, 0, dim) for dim in dims]
        self.data = [torch.zeros(shape, dtype=model.dtype, device=self.device) for shape in shapes]
        self.pick: torch.Tensor | None = None  # in a prefill: positions of the flat batch that need logits
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: None if self.pick is None else (args[0].flatten(0, -2)[None, self.pick], *args[1:])
        )

    def empty(self) -> None:
        """Free the memory of the cache; no row may be in use."""
        self.data = [part[:, :0, :, :0].clone() for part in self.data]
        self.states = [part[:, :0].clone() for part in self.states]

    def _reserve(self, rows: int, length: int) -> None:
        _, old_rows, _, old_length, _ = self.data[0].shape
        if rows <= old_rows and length <= old_length:
            return
        rows = old_rows if rows <= old_rows else min(self.max_rows, max(rows, 2 * old_rows, 8))
        length = old_length if length <= old_length else min(self.max_length, max(length, 2 * old_length, 64))
        # Zeros, because a masked position still multiplies its value by 0, and 0 * NaN is NaN.
        for i, old in enumerate(self.data):
            self.data[i] = old.new_zeros(old.shape[0], rows, old.shape[2], length, old.shape[4])
            self.data[i][:, :old_rows, :, :old_length] = old
        self.reserve_states(rows)

    def prefill(self, sequences: Sequence[Sequence[int]], source: Sequence[int], first_row: int) -> torch.Tensor:
        """Fill row `first_row + i` with `sequences[source[i]]`. Return float32 logits `[len(source), vocab]`."""
        longest = max(map(len, sequences))
        self._reserve(first_row + len(source), longest)
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device)
        ends = [i * longest + len(s) - 1 for i, s in enumerate(sequences)]
        self.pick, rows = torch.tensor(ends, device=self.device), torch.tensor(source, device=self.device)
        self.source, self.first_row, positions = rows, first_row, torch.arange(longest, device=self.device)[None]
        try:
            logits = self.model(ids, past_key_values=self, use_cache=True, position_ids=positions).logits[0]
        finally:
            self.pick = self.source = None
        if self.recorder is not None:
            noted = self.recorder.rows()
            self.routes = [noted[i * longest : i * longest + len(sequences[i])] for i in source]
        return logits[rows].float()

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append `tokens[i]` to row i, which then has `lengths[i]` tokens. Return float32 logits `[batch, vocab]`."""
        used, longest = len(tokens), self.max_length if self.fixed else max(lengths)
        self.num_rows = self.max_rows if self.fixed else used
        self._reserve(self.num_rows, longest)
        self.length = min(-(-longest // 16) * 16, self.data[0].shape[3])  # few shapes, aligned rows of the mask
        pad = self.num_rows - used
        ids, ends = torch.tensor([[*tokens, *[0] * pad], [*lengths, *[1] * pad]], device=self.device)[:, :, None]
        heads = torch.arange(self.num_rows * self.kv_heads, device=self.device)
        self.where = heads * self.data[0].shape[3] + (ends[:, 0] - 1).repeat_interleave(self.kv_heads)
        unseen = torch.arange(self.length, device=self.device) >= ends
        mask = self.data[0].new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None, None]
        out = self.model(ids, position_ids=ends - 1, attention_mask=mask, past_key_values=self, use_cache=True)
        if self.recorder is not None:
            self.routes = list(self.recorder.rows()[:used, None])
        return out.logits[:used, -1].float()

    def score(self, tokens: Sequence[int], num: int = 0) -> list[list[Ranked]]:
        """Score each token from the second on, given those before it, and find the `num` likeliest tokens at its place.

        The cache is not changed.
        """
        ids = torch.tensor([tokens], device=self.device)
        logits, out = self.model(ids, use_cache=False).logits[0, :-1], []
        for part, at in zip(logits.split(1024), ids[0, 1:, None].split(1024), strict=True):  # bounds the float32 copy
            log_probs = log_softmax(part.float())
            own = log_probs.gather(1, at)
            ranks = (log_probs >= own).sum(1)
            best, which = log_probs.topk(min(num, log_probs.shape[1]))
            columns = (column.tolist() for column in (at[:, 0], own[:, 0], ranks, which, best))
            for token, score, rank, others, scores in zip(*columns, strict=True):
                likely = [(t, p, i) for i, (t, p) in enumerate(zip(others, scores, strict=True), 1) if t != token]
                out.append([(token, score, rank), *likely])
        return out

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store new keys and values, and return those to attend to. The model's attention calls this."""
        own = [part[self.place[layer_idx]] for part in self.data]
        for cache, new in zip(own, (key_states, value_states), strict=True):
            if self.source is not None:
                cache[self.first_row : self.first_row + self.source.numel(), :, : new.shape[2]] = new[self.source]
            else:
                cache.view(-1, cache.shape[-1]).index_copy_(0, self.where, new.reshape(-1, cache.shape[-1]))
        if self.source is not None:
            return key_states, value_states
        return tuple(part[: self.num_rows, :, : self.length] for part in own)

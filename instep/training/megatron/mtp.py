"""Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2) on a packed stream: engines draft with it.

Layer k computes h' = layer(W [norm(emb(t_{i+k})); norm(h_i)]), with the normed h of layer k - 1 or of the policy.
The policy's output layer turns the normed h' into the log-probs of t_{i+k+1}. As in slime, these layers are trained
beside the policy: its states, embedding and output layer are constants here, and get no gradient.

Parameters have the names of Megatron's own module. That module loops over samples on the host, and cannot recompute
packed sequences.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from instep.training.log_probs import in_chunks, log_probs_and_entropy
from instep.training.packed_attention import rows
from instep.training.packing import position_ids, response_positions
from instep.types import TokenBatch


class PredictionLayer(MegatronModule):
    """One more token ahead.

    Args:
        number: of its transformer layer, from 1, counted behind those of the policy.
        layer, norm: of the family.
    """

    def __init__(
        self, config: TransformerConfig, number: int, layer: ModuleSpec, norm: type, groups: Any, vp_stage: int | None
    ):
        super().__init__(config)
        self.tp_group, hidden = groups.tp, config.hidden_size
        norms = (norm(config, hidden, config.layernorm_epsilon) for _ in range(3))
        self.enorm, self.hnorm, self.final_layernorm = norms
        how: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False, tp_group=groups.tp)
        self.eh_proj = ColumnParallelLinear(2 * hidden, hidden, gather_output=False, **how)
        before = get_transformer_layer_offset(config, vp_stage)  # which the layer adds to its number
        places: dict[str, Any] = dict(layer_number=number - before, pg_collection=groups, vp_stage=vp_stage)
        self.transformer_layer = build_module(layer, config=config, **places)

    def forward(self, hidden: Tensor, embedded: Tensor, packed: Any, padding: Tensor | None) -> Tensor:
        """Compute states and embeddings `[num_tokens, 1, hidden]` -> states; with sequence parallelism, of this rank's
        part of the tokens."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        x = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0], group=self.tp_group)
        if self.config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x, group=self.tp_group)
        x, _ = self.transformer_layer(x, attention_mask=None, packed_seq_params=packed, padding_mask=padding)
        return self.final_layernorm(x)  # type: ignore[no-any-return]


class MultiTokenPrediction(MegatronModule):
    """The layers of multi-token prediction, behind the policy's own.

    Args:
        layer, norm: of the family.
        vocab: the size of the vocabulary, without and with padding.
        num_logits: how many logits are computed at a time, over all ranks that share them.
        embeds: whether this stage of the pipeline has the embedding; otherwise the module has a copy, which
            `bring_embedding` fills.

    Attributes:
        trains: they run in the passes of an optimizer step; otherwise they are only kept.
    """

    trains = False

    def __init__(
        self,
        config: TransformerConfig,
        count: int,
        layer: ModuleSpec,
        norm: type,
        groups: Any,
        vp_stage: int | None,
        *,
        vocab: tuple[int, int],
        num_logits: int,
        embeds: bool,
    ):
        super().__init__(config)
        self.tp_group, self.vocab, self.num_logits = groups.tp, vocab, num_logits
        if not embeds:
            how: dict[str, Any] = dict(init_method=config.init_method, config=config, tp_group=groups.tp)
            scatter = config.sequence_parallel
            copy = VocabParallelEmbedding(vocab[1], config.hidden_size, reduce_scatter_embeddings=scatter, **how)
            weight = copy.weight.detach()
            del copy.weight
            copy.register_buffer("weight", weight, persistent=False)
            self.embedding = copy
        numbers = range(config.num_layers + 1, config.num_layers + 1 + count)
        layers = [PredictionLayer(config, n, layer, norm, groups, vp_stage) for n in numbers]
        self.layers = torch.nn.ModuleList(layers)

    def forward(
        self, hidden: Tensor, packed: Any, padding: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the states of each layer.

        Args:
            hidden: the policy's, `[num_tokens, 1, hidden]`; with sequence parallelism, of this rank's part.
            packed: the `PackedInput` of `spec.py`.
            embed: turns tokens `[1, num_tokens]` into the same form.
        """
        states, tokens = [], packed.tokens
        hidden = hidden.detach().requires_grad_()  # layers that are computed again need an input with a gradient
        for layer in self.layers:
            tokens = shifted(tokens, packed.cu_seqlens_q)
            with torch.no_grad():
                embedded = embed(tokens)
            run = partial(layer, packed=packed, padding=padding)
            again = self.config.recompute_granularity == "full"
            hidden = checkpoint(run, False, hidden, embedded) if again else run(hidden, embedded)
            states.append(hidden)
        return states

    def log_probs(
        self, hidden: Tensor, packed: Any, padding: Tensor | None, embed: Callable[[Tensor], Tensor], weight: Tensor
    ) -> Tensor:
        """Return the log-probs of response tokens by each layer, `[layers, num_response_tokens]`, at temperature 1.

        The value is meaningless for a token that a layer cannot predict; `draft_loss` leaves it out.

        Args:
            weight: of the output layer, which gets no gradient.
        """
        parts = self.tp_group.size()
        group = self.tp_group if parts > 1 else None

        def head(drafting: Tensor, targets: Tensor, ones: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
            logits = linear_with_frozen_weight(drafting, weight, None, False, parts > 1, False, self.tp_group)
            how: dict[str, Any] = dict(vocab_size=self.vocab[0], tp_group=group, with_entropy=entropy)
            return log_probs_and_entropy(logits[:, 0], targets, ones, **how)

        found = []
        for ahead, states in enumerate(self(hidden, packed, padding, embed), 1):
            if self.config.sequence_parallel:
                states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
            drafting, ones = rows(states, (packed.positions - ahead).clamp(min=0)), torch.ones_like(packed.temperature)
            sizes: dict[str, Any] = dict(num_logits=self.num_logits, vocab_size=self.vocab[1])
            found.append(in_chunks(head, drafting, packed.targets, ones, False, **sizes)[0])
        return torch.stack(found)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the copy of the embedding makes of tokens `[1, num_tokens]`: `[num_tokens, 1, hidden]`."""
        embedded: Tensor = self.embedding(tokens)
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            found |= layer.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return found


def bring_embedding(chunks: Sequence[Any], stages: Any) -> None:
    """Copy the embedding of the first stage of a pipeline to the last one, which drafts with it; collective.

    Args:
        chunks: of this rank; stages: the group of the pipeline.
    """
    last = stages.size() - 1
    if stages.rank() == 0:
        dist.send(chunks[0].embedding.word_embeddings.weight.detach(), group=stages, group_dst=last)
    elif stages.rank() == last:
        dist.recv(chunks[-1].mtp.embedding.weight, group=stages, group_src=0)


def shifted(tokens: Tensor, bounds: Tensor) -> Tensor:
    """Return the next token of each token `[1, num_tokens]`; the last one of a sample gets token 0, as in Megatron.

    Args:
        bounds: where each sample starts, and the last one ends.
    """
    following = tokens.roll(-1, dims=1)
    following[:, bounds[1:].long() - 1] = 0
    return following


def draft_loss(log_probs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross entropy of response tokens, weighted as in the policy's loss, and the sums for its metric.

    A layer leaves out the first tokens of a sample, which it cannot predict. Loss and sums are means over layers.

    Args:
        log_probs: `[layers, num_response_tokens]`, of each response token by each layer.
    """
    before = position_ids(batch)[response_positions(batch)]  # tokens of its sample before the one that predicts it
    ahead = torch.arange(1, len(log_probs) + 1, device=before.device)
    weights = batch.token_columns["loss_weights"] * (before >= ahead[:, None]) / len(log_probs)
    loss = -(weights * log_probs).sum()
    return loss, {"mtp_loss": loss.detach(), "mtp_weight": weights.sum()}

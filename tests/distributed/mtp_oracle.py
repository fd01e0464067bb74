"""Multi-token prediction in plain PyTorch, sample by sample: arXiv 2412.19437, section 2.2, a layer of transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.types import TokenBatch
from tests.distributed.megatron_layouts import BETAS, EPS, MTP_SCALE, WEIGHT_DECAY, random_model


class Drafter:
    """A layer of multi-token prediction of `model`, with random weights, and its AdamW.

    The layer and the last norm are those of another random model.
    """

    def __init__(self, model: Any):
        self.model, config = model, copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        self.other: Any = random_model(config, seed=8)
        self.layer, self.norm = self.other.model.layers[-1], self.other.model.norm
        self.of_embedding, self.of_hidden = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        hidden = config.hidden_size
        self.projection = torch.nn.Linear(2 * hidden, hidden, bias=False)
        g = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for norm in (self.of_embedding, self.of_hidden):
                norm.weight += 0.1 * torch.randn(hidden, generator=g)
            self.projection.weight.copy_(0.1 * torch.randn(hidden, 2 * hidden, generator=g))
        modules = (self.layer, self.norm, self.of_embedding, self.of_hidden, self.projection)
        self.params = [p for module in modules for p in module.parameters()]
        groups = [
            {"params": [p for p in self.params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)

    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probs `[num_tokens - 2, vocabulary]` of the token after each token's next one. The policy gets
        no gradient."""
        body, length = self.model.model, len(tokens)
        with torch.no_grad():
            states = body(tokens[None]).last_hidden_state[0]
            following = body.embed_tokens(torch.cat([tokens[1:], tokens.new_zeros(1)]))  # the last one has none
        x = self.projection(torch.cat([self.of_embedding(following), self.of_hidden(states)], dim=-1))[None]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotary = self.other.model.rotary_emb(x, positions)
        x = self.layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        logits = self.norm(x)[0] @ self.model.lm_head.weight.detach().T
        return torch.log_softmax(logits, -1)[: length - 2]

    def loss(self, batch: TokenBatch) -> torch.Tensor:
        """Return the weighted sum of cross entropies over response tokens that have two tokens before them."""
        rows = zip(
            batch.tokens.split(batch.total_lengths.tolist()),
            batch.token_columns["loss_weights"].split(batch.response_lengths.tolist()),
            strict=True,
        )
        loss = torch.zeros(())
        for tokens, weights in rows:
            log_probs = self.log_probs(tokens)
            for place in range(max(2, len(tokens) - len(weights)), len(tokens)):
                weight = weights[place - len(tokens)]
                loss = loss - weight * log_probs[place - 2, tokens[place]]
        return loss

    def step(self, batches: Sequence[TokenBatch], lr: float, clip: float, bias_rate: float) -> float:
        """Take a step; return the norm of the gradients."""
        gate, chosen = getattr(self.layer.mlp, "gate", None), []
        handle = gate.register_forward_hook(lambda m, args, out: chosen.append(out[2].flatten())) if bias_rate else None
        self.optimizer.zero_grad()
        loss: Any = sum(self.loss(batch) for batch in batches)
        (MTP_SCALE * loss).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, clip))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if handle is not None and gate is not None:
            handle.remove()
            counts = torch.cat(chosen).bincount(minlength=gate.weight.shape[0]).float()
            gate.e_score_correction_bias += bias_rate * (counts.mean() - counts).sign()
        assert norm > clip, "the clip must act"
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies under the names of published checkpoints."""
        config, last = self.model.config, f"model.layers.{self.model.config.num_hidden_layers - 1}."
        inside = {n.removeprefix(last): t for n, t in checkpoint_weights(self.other).items() if n.startswith(last)}
        parts = {"norm": self.norm, "embedding": self.of_embedding, "hidden": self.of_hidden, "fc": self.projection}
        own = {name: module.weight.detach().clone() for name, module in parts.items()}
        if config.model_type != "deepseek_v3":
            names = dict(norm="norm", embedding="pre_fc_norm_embedding", hidden="pre_fc_norm_hidden", fc="fc")
            return {f"mtp.layers.0.{n}": t for n, t in inside.items()} | {
                f"mtp.{names[n]}.weight": t for n, t in own.items()
            }
        names = dict(norm="shared_head.norm", embedding="enorm", hidden="hnorm", fc="eh_proj")
        shared = {
            "embed_tokens.weight": self.model.model.embed_tokens.weight.detach().clone(),
            "shared_head.head.weight": self.model.lm_head.weight.detach().clone(),
        }
        found = inside | {f"{names[n]}.weight": t for n, t in own.items()} | shared
        return {f"model.layers.{config.num_hidden_layers}.{n}": t for n, t in found.items()}


def checkpoint_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights under the names of checkpoints: transformers has all experts of a layer in one tensor."""
    names, weights = CheckpointNames(model), {n: p.detach().clone() for n, p in named_weights(model).items()}
    return {
        name: tensor.clone()
        for group in names.groups
        for name, tensor in zip(group.checkpoint, names.to_checkpoint(group, weights), strict=True)
    }

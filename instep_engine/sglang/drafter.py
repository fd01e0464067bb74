"""Speculative decoding: a model's own layers of multi-token prediction get their weights together with the model.

SGLang has such a drafter as a second model, which shares the embedding and the output layer of the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

# What SGLang's verification of drafts does not apply to each token, and the values that change nothing.
NEUTRAL = {
    **{"min_p": 0.0, "min_new_tokens": 0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
}


class WithDrafters(nn.Module):
    """A model and its drafters, as one model whose weights are loaded. Each takes its own of a checkpoint's."""

    def __init__(self, model: nn.Module, drafters: Sequence[nn.Module]):
        super().__init__()
        self.served, self.drafters = model, nn.ModuleList(drafters)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = list(weights)
        for model in (self.served, *self.drafters):
            model.load_weights(iter(tensors))


def own_drafters(manager: Any) -> list[nn.Module]:
    """Return the drafters that a scheduler's `manager` of weights has from the checkpoint of the served model.

    A drafter of another checkpoint, or none at all (NGRAM), is not the trainer's.
    """
    if manager.draft_worker is None:
        return []
    path = os.path.realpath(manager.tp_worker.model_runner.model_config.model_path)
    runners = getattr(manager.draft_worker.draft_worker, "draft_runners", ())  # those that predict several tokens
    return [runner.model for runner in runners if os.path.realpath(runner.model_config.model_path) == path]


def check_request(obj: Any) -> None:
    """Refuse what would change the distribution of samples. Raises ValueError, which a client gets."""
    params = obj.sampling_params
    changed = [name for name, neutral in NEUTRAL.items() if (params.get(name) or neutral) != neutral]
    if obj.custom_logit_processor:
        changed.append("custom_logit_processor")
    if changed:
        raise ValueError(f"with speculative decoding SGLang does not apply {', '.join(changed)} to each token")


def count(result: None, manager: Any, meta_info: dict[str, Any], *_: Any) -> None:
    """Count the drafts of a response that has ended (after `TokenizerManager._calculate_spec_decoding_metrics`)."""
    manager.instep.drafted += meta_info.get("spec_num_proposed_drafts", 0)
    manager.instep.taken += meta_info.get("spec_num_correct_drafts", 0)

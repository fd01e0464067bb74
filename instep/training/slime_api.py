"""The functions that losses and corrections for slime import from its trainer.

Context parallelism is not supported here: a rank has all tokens of its samples. So both slice functions return their
input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.arguments.settings import RolloutSettings
from instep.training.log_probs import log_probs_and_entropy


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the whole response's values from this rank's: `[response_length]`."""
    return tensor


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return this rank's part of a response's values: `[response_length]`."""
    return log_prob


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: RolloutSettings,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Compute log-probs (and entropy) of the response tokens at `--rollout-temperature`, with gradient.

    Args:
        logits: `[1, num_tokens, vocab_size]`, as a custom loss gets them.

    Returns:
        An empty tensor, and a dict: `log_probs` and `entropy` each have one `[response_length]` tensor per sample.
    """
    ends = torch.tensor(total_lengths).cumsum(0).tolist()
    rows = zip(ends, response_lengths, strict=True)
    scores = torch.cat([logits[0, end - length - 1 : end - 1] for end, length in rows])
    targets = torch.cat([t[len(t) - n :] for t, n in zip(unconcat_tokens, response_lengths, strict=True)])
    temperature = scores.new_full((len(targets),), args.rollout_temperature)
    log_probs, entropy = log_probs_and_entropy(
        scores, targets, temperature, vocab_size=logits.shape[-1], with_entropy=with_entropy
    )
    out = {"log_probs": list(log_probs.split(response_lengths))}
    if entropy is not None:
        out["entropy"] = list(entropy.split(response_lengths))
    return logits.new_empty(0), out

"""Sampling of the next token from the processed distribution. The draw depends only on (seed, position)."""

import torch
from torch import Tensor

Limits = tuple[Tensor, Tensor]  # top_k int64 and top_p float32, [batch] each
# splitmix64's constants (Steele et al. 2014) as signed integers: torch has no uint64 arithmetic, int64 wraps the same.
_GAMMA, _MIX1, _MIX2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw float64 `[batch]` in [0, 1) by splitmix64, with 40 bits: times a total near 1 they stay below the total."""
    return _shift(_mix(_mix(seeds + _GAMMA) + positions * _GAMMA), 24).double() * 2.0**-40


def truncate(logits: Tensor, truncation: Limits) -> Tensor:
    """Logits `[batch, vocab]` with -inf outside top_k and top_p, applied in vLLM's order."""
    top_k, top_p = (x[:, None] for x in truncation)
    ordered, where = logits.sort(-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= top_k, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs  # mass of the likelier tokens
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, where, ordered)


def log_softmax(logits: Tensor) -> Tensor:
    """Return each row's log-softmax. On a CPU torch's is off by 3e-5 for 262,144 float32 logits, this by 4e-6."""
    return logits - logits.logsumexp(-1, keepdim=True)


def distribution(logits: Tensor, temperature: Tensor, truncation: Limits | None) -> Tensor:
    """Return log-probs float32 `[batch, vocab]` of the distribution that tokens are drawn from; see `sample`."""
    logits = logits / temperature.masked_fill(temperature == 0, 1.0)[:, None]
    return log_softmax(logits if truncation is None else truncate(logits, truncation))


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Limits | None) -> tuple[Tensor, Tensor]:
    """Return tokens int64 `[batch]`, and their log-probs float32 `[batch]` in the distribution they were drawn from.

    `logits` are float32 `[batch, vocab]`. `uniform`, float64 `[batch]` in [0, 1), is inverted through the cumulative
    distribution. Temperature 0 takes the likeliest token, with its log-prob at temperature 1 (as in vLLM).
    """
    log_probs = distribution(logits, temperature, truncation)
    cdf = log_probs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(temperature == 0, logits.argmax(-1), tokens)
    tokens.clamp_(max=logits.shape[1] - 1)  # matters only for NaN logits
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

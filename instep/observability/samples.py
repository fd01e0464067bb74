"""The rows of samples.jsonl: a sample with what is known about each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from instep.types import Group, Sample

MAX_LOGGED_TOKENS = 4096  # of a response, per sample; `response_length` says how many there are
_KEYS = ("group_index", "index", "prompt", "response", "response_length", "reward", "label", "metadata", "status")


def spread(groups: Sequence[Group], limit: int) -> list[Sample]:
    """Return up to `limit` samples: the first one of each group, then the second one of each, and so on."""
    deepest = max((len(group) for group in groups), default=0)
    return [group[i] for i in range(deepest) for group in groups if i < len(group)][:limit]


def sample_row(
    sample: Sample,
    texts: Callable[[list[int]], list[str]] | None = None,
    log_probs: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the sample as JSON. `tokens` holds equally long lists for the first `MAX_LOGGED_TOKENS` response tokens:

    `ids`, `texts`, `loss_mask` (as trained on: all 0 with `remove_sample`), `rollout_log_probs` (the engine's) and
    `log_probs` (the trainer's under the weights that sampled). What is not known is null.

    Args:
        texts: token ids -> the text of each.
        log_probs: the trainer's `[response_length]`.
    """
    row = sample.to_dict()
    out = {key: row[key] for key in _KEYS}
    out["weight_versions"] = [span.version for span in sample.weight_versions]
    out["version_spans"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
    n = min(sample.response_length, MAX_LOGGED_TOKENS)
    ids = [int(i) for i in sample.tokens[sample.prompt_length :][:n]]
    mask = [0] * n if sample.remove_sample else [1] * n if sample.loss_mask is None else sample.loss_mask[:n]
    out["tokens"] = {
        "ids": ids,
        "texts": texts(ids) if texts is not None else None,
        "loss_mask": [int(m) for m in mask],
        "rollout_log_probs": _rounded(sample.rollout_log_probs, n),
        "log_probs": _rounded(log_probs, n),
    }
    return out


def gaps(row: dict[str, Any]) -> list[float | None]:
    """Return |trainer - engine| of each logged token's log-prob; None where one of them is unknown, and for tokens that
    are not trained on (a tool's token has a placeholder)."""
    tokens = row.get("tokens") or {}
    mask = tokens.get("loss_mask") or []
    columns = [tokens.get(name) or [None] * len(mask) for name in ("rollout_log_probs", "log_probs")]
    return [
        abs(ours - engine) if trained and engine is not None and ours is not None else None
        for trained, engine, ours in zip(mask, *columns, strict=True)
    ]


def _rounded(values: Sequence[float] | None, n: int) -> list[float | None] | None:
    if values is None:
        return None
    return [float(f"{v:.9g}") if v is not None and math.isfinite(v) else None for v in values[:n]]

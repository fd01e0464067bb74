"""The rows of samples.jsonl: a sample with data for each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from instep.observability.metrics import num_trained
from instep.types import Group, Sample, as_number

MAX_LOGGED_TOKENS = 4096  # of a response, per sample; `response_length` is the full length
_KEYS = ("group_index", "index", "prompt", "response", "response_length", "reward", "label", "metadata", "status")


def to_log(groups: Sequence[Group], limit: int, reward_key: str | None = None) -> list[Sample]:
    """Return the samples of a rollout to log: the first one of each group, then the second one of each, up to `limit`.
    Add the samples with the lowest and the highest reward and the longest response.

    Args:
        reward_key: the entry to use where rewards are dicts; samples without a number have no reward here.
    """
    deepest = max((len(group) for group in groups), default=0)
    all_samples = [group[i] for i in range(deepest) for group in groups if i < len(group)]
    if not limit or not all_samples:
        return []
    rewarded = [(r, s) for s in all_samples if (r := reward_number(s.reward, reward_key)) is not None]
    extremes = [pick(rewarded, key=lambda pair: pair[0])[1] for pick in (min, max) if rewarded]
    extremes.append(max(all_samples, key=lambda s: s.response_length))
    return list({id(s): s for s in [*all_samples[:limit], *extremes]}.values())


def reward_number(reward: Any, key: str | None) -> float | None:
    """Return a reward as a number (of a dict the entry `key`), or None."""
    return as_number(reward.get(key) if isinstance(reward, dict) else reward)


def sample_row(
    sample: Sample,
    texts: Callable[[list[int]], list[str]] | None = None,
    log_probs: Sequence[float] | None = None,
    entropies: Sequence[float] | None = None,
    *,
    rewarded: bool = True,
) -> dict[str, Any]:
    """Return the sample as JSON. `tokens` has equally long lists for the first `MAX_LOGGED_TOKENS` response tokens:

    `ids`, `texts`, `loss_mask` (as in training: all 0 with `remove_sample`), `rollout_log_probs` (the engine's),
    `log_probs` (the trainer's, with the weights that sampled) and `entropies` (the trained policy's, as its step found
    it). Unknown values are null. `gap_max` is the largest of `gaps`.

    Args:
        texts: token ids -> the text of each.
        log_probs, entropies: the trainer's `[response_length]`.
        rewarded: False for a sample of the data (SFT, DPO), which no engine generated. It has no reward, but `loss`
            (mean of -log-prob over the trained tokens), `num_tokens`, `num_trained`, and in a pair `pair`.
    """
    row = sample.to_dict()
    out = {key: row[key] for key in _KEYS}
    if not rewarded:
        trained = num_trained(sample)
        mask = sample.loss_mask or [1] * sample.response_length
        summed = -math.fsum(p for p, m in zip(log_probs, mask, strict=True) if m) if log_probs else None
        loss = summed / trained if summed is not None and trained else None
        out |= {"reward": None, "loss": loss, "num_tokens": len(sample.tokens), "num_trained": trained}
        out |= {"pair": row["pair"]} if "pair" in row else {}
    out["weight_versions"] = [span.version for span in sample.weight_versions]
    out["version_spans"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
    n = min(sample.response_length, MAX_LOGGED_TOKENS)
    ids = [int(i) for i in sample.tokens[sample.prompt_length :][:n]]
    mask = [0] * n if sample.remove_sample else [1] * n if sample.loss_mask is None else sample.loss_mask[:n]
    tokens = {
        "ids": ids,
        "texts": texts(ids) if texts is not None else None,
        "loss_mask": [int(m) for m in mask],
        "rollout_log_probs": _rounded(sample.rollout_log_probs, n),
        "log_probs": _rounded(log_probs, n),
        "entropies": _rounded(entropies, n, 4),
    }
    out["gap_max"] = max((gap for gap in gaps({"tokens": tokens}) if gap is not None), default=None)
    out["tokens"] = tokens  # last: an index of many samples need not read it
    if not rewarded and not out["response"]:
        out["response"] = "".join(out["tokens"]["texts"] or [])
    return out


def gaps(row: dict[str, Any]) -> list[float | None]:
    """Return |trainer - engine| of each logged token's log-prob; None if one of them is unknown, and for tokens that
    are not trained on (a tool's token has a placeholder)."""
    tokens = row.get("tokens") or {}
    mask = tokens.get("loss_mask") or []
    columns = [tokens.get(name) or [None] * len(mask) for name in ("rollout_log_probs", "log_probs")]
    return [
        abs(ours - engine) if trained and engine is not None and ours is not None else None
        for trained, engine, ours in zip(mask, *columns, strict=True)
    ]


def _rounded(values: Sequence[float] | None, n: int, digits: int = 9) -> list[float | None] | None:
    if values is None:
        return None
    return [float(f"{v:.{digits}g}") if v is not None and math.isfinite(v) else None for v in values[:n]]

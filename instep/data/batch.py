"""Groups of samples -> the flat columns of a trainer's batch, checked for what training needs."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from instep.data.sampling import distribution_of, truncated_by
from instep.errors import RolloutError
from instep.models.routes import as_routes
from instep.types import Group, Sample, TokenBatch, VersionSpan, name_of, reward_of


def build_batch(
    groups: Sequence[Group],
    *,
    reward_key: str | None = None,
    needs_reward: bool = True,
    default_temperature: float = 1.0,
    compares: str = "",
    replays: bool = False,
) -> TokenBatch:
    """Build the columns from the samples of the groups, in order. Their own columns already fit (`rollout/outputs.py`).

    Token columns: `loss_mask` (1 for samples without one, 0 for those with `remove_sample`), and `rollout_log_probs` if
    any sample has them (NaN for samples without). Sample columns: `temperature` (the sample's own, else
    `default_temperature`), `rewards` (if `needs_reward`), `group_index`, `index` (-1 where unknown), and lists:
    `execution_id` (a new one for a sample without), `status`, `weight_versions` (`Sample.version_spans`), `metadata`,
    `train_metadata`, `extra`; with `replays` also `routed_experts` (`routes.py`), a row for every token. `index` and
    `group_index` are int64, the other tensors float32.

    Args:
        reward_key: the entry to take from a reward that is a dict.
        needs_reward: False for supervised fine-tuning, whose samples have no reward.
        compares: the flags that compare the engine's log-probs with the trainer's. The trainer's are of the full
            distribution, so samples that the engine drew from another one are refused.
        replays: training uses the experts that the engine chose (--use-rollout-routing-replay).

    Raises:
        RolloutError: a sample cannot be trained on; the error gives the reason.
        RewardError: a reward is missing or no finite number.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise RolloutError(
            "the rollout returned no samples", remedy="return at least one group", where="--rollout-function-path"
        )
    rewards: list[float] = []
    temperatures: list[float] = []
    for sample in samples:
        _check_lengths(sample)
        temperatures.append(_temperature(sample, default_temperature, compares))
        if needs_reward:
            rewards.append(reward_of(sample, reward_key))
    mask = _masks(samples)
    token_columns = {"loss_mask": torch.from_numpy(mask)}
    if any(s.rollout_log_probs is not None for s in samples):
        token_columns["rollout_log_probs"] = torch.from_numpy(_log_probs(samples, mask))
    sample_columns: dict[str, Any] = {
        "temperature": torch.tensor(temperatures, dtype=torch.float32),
        "group_index": torch.tensor([s.group_index for s in samples], dtype=torch.int64),
        "index": torch.tensor([-1 if s.index is None else s.index for s in samples], dtype=torch.int64),
        "execution_id": [f"sample-{i}" if s.execution_id is None else s.execution_id for i, s in enumerate(samples)],
        "status": [s.status.value for s in samples],
        "weight_versions": [s.version_spans for s in samples],
        "metadata": [s.metadata for s in samples],
        "train_metadata": [s.train_metadata for s in samples],
        "extra": [s.extra for s in samples],
    }
    if replays:
        ends = np.cumsum([s.response_length for s in samples])
        rows = [_routes(s, own) for s, own in zip(samples, np.split(mask, ends[:-1]), strict=True)]
        if some := [r for r in rows if len(r)]:  # otherwise nothing is trained
            sample_columns["routed_experts"] = [
                _padded(r if len(r) else some[0][:1], len(s.tokens)) for r, s in zip(rows, samples, strict=True)
            ]
    if needs_reward:
        sample_columns["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    return TokenBatch(
        tokens=_tokens(samples),
        total_lengths=torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
        response_lengths=torch.tensor([s.response_length for s in samples], dtype=torch.int64),
        token_columns=token_columns,
        sample_columns=sample_columns,
    )


def is_older(name: str, version: int) -> bool:
    """Return whether an earlier sync brought the weights `name`. A name without a sync is of another process."""
    return name.isdigit() and int(name) < version


def older_tokens(batch: TokenBatch, version: int, samples: Sequence[Sample]) -> torch.Tensor:
    """Mark response tokens from older weights than `version` whose engine log-prob is known: 1 or 0.

    A partial rollout and a group from the buffer have such tokens. Tokens of an unknown version count as the oldest
    possible (`Sample.version_spans`). Log-probs of a truncated distribution (top-p, ...) are no base for a ratio of the
    full one, so their tokens count as new.

    Args:
        samples: the samples of the batch, in its order.

    Returns:
        float32 `[num_response_tokens]`.
    """
    out = marked_tokens(
        samples, lambda s: [p for p in s.version_spans if is_older(p.version, version)] if not truncated_by(s) else []
    )
    known = batch.token_columns.get("rollout_log_probs")
    if not out.any():
        return out
    return out * (0 if known is None else ~known.isnan())


def marked_tokens(samples: Sequence[Sample], spans_of: Callable[[Sample], list[VersionSpan]]) -> torch.Tensor:
    """Return float32 `[num_response_tokens]`: 1 in the spans that `spans_of` returns for each sample, else 0."""
    out, start = np.zeros(sum(s.response_length for s in samples), np.float32), 0
    for sample in samples:
        for span in spans_of(sample):
            out[start + span.start : start + span.end] = 1
        start += sample.response_length
    return torch.from_numpy(out)


def _masks(samples: Sequence[Sample]) -> np.ndarray:
    """Return the loss masks of all samples, float32 `[num_response_tokens]`."""
    out, start = np.ones(sum(s.response_length for s in samples), np.float32), 0
    for sample in samples:
        given, n = sample.loss_mask, sample.response_length
        if sample.remove_sample:
            out[start : start + n] = 0
        elif given is not None and not (type(given) is list and given.count(1) == n):
            if not {0, 1}.issuperset(given):
                wrong = next((m for m in given if m not in (0, 1)), given)
                raise _error(sample, f"loss_mask holds {wrong!r}", "use only 0 and 1 in a loss mask")
            out[start : start + n] = given
        start += n
    return out


def _log_probs(samples: Sequence[Sample], mask: np.ndarray) -> np.ndarray:
    """Return float32 `[num_response_tokens]`: NaN where all are unknown, 0 for None of an untrained token."""
    out, start = np.empty(len(mask), np.float32), 0
    for sample in samples:
        values, end = sample.rollout_log_probs, start + sample.response_length
        if values is None:
            out[start:end] = math.nan
        else:
            try:
                struct.pack_into(f"={end - start}f", out.data, 4 * start, *values)  # in a third of numpy's time
            except (struct.error, OverflowError):  # None, or beyond float32
                out[start:end] = [math.nan if value is None else value for value in values]
        start = end
    if not np.isfinite(out).all():
        _mend_log_probs(samples, mask, out)
    return out


def _mend_log_probs(samples: Sequence[Sample], mask: np.ndarray, out: np.ndarray) -> None:
    """Replace None by 0. Raise if a log-prob of a trained token is not a finite number."""
    start = 0
    for sample in samples:
        known = np.isfinite(out[start : start + sample.response_length]).all()
        for t, value in enumerate([] if known or sample.rollout_log_probs is None else sample.rollout_log_probs):
            if mask[start + t] and (value is None or not math.isfinite(value)):
                raise _error(
                    sample,
                    f"rollout_log_probs[{t}] is {value}",
                    "give a finite log-prob for each trained token, or None for the whole list if they are unknown",
                )
            if value is None:
                out[start + t] = 0.0
        start += sample.response_length


def _temperature(sample: Sample, default: float, compares: str) -> float:
    """Return the temperature of all trained tokens of a sample, and check its sampling parameters."""
    turns = sample.sampling_turns or [distribution_of({"temperature": default, **sample.sampling_params})]
    value: Any = turns[0]["temperature"]
    if any(turn["temperature"] != value for turn in turns):
        raise _error(
            sample,
            f"its turns were sampled at temperatures {', '.join(str(turn['temperature']) for turn in turns)}",
            "a sample has one temperature: use one for all its trained turns, append the others with "
            "trainable=False, or set sample.sampling_params and sampling_turns to the values of its sampling",
        )
    truncated = truncated_by(sample)
    if truncated and compares and sample.rollout_log_probs is not None:
        raise _error(
            sample,
            f"it was sampled with {', '.join(f'{name} {x!r:.40}' for name, x in truncated.items())}, but "
            f"{compares} compares log-probs of the full distribution",
            f"sample from the full distribution, or remove {compares}",
        )
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        remedy = "train on samples of a temperature above 0: a greedy choice has no log-prob to learn from"
        raise _error(sample, f"it was sampled at temperature {value!r}", remedy)
    return float(value)


def _routes(sample: Sample, mask: np.ndarray) -> np.ndarray:
    """Return `[_, num_layers, experts per token]` of the known tokens: at least all before the last trained one."""
    needed = sample.prompt_length + int(mask.nonzero()[0].max()) if mask.any() else 0
    try:
        known = sample.rollout_routed_experts
        rows = as_routes(np.zeros((0, 1, 1), np.uint8) if known is None else known)
    except ValueError as error:
        raise _error(sample, str(error), "keep rollout_routed_experts as the engine returned them") from error
    if len(rows) < needed:
        raise _error(
            sample,
            f"the engine's experts of {len(rows)} tokens are known, but {needed} are needed",
            "sample with engines that return them (--enable-return-routed-experts), and pass their rows to "
            "sample.append_response_tokens(routed_experts=...); or remove --use-rollout-routing-replay",
        )
    return rows[: len(sample.tokens)]


def _padded(rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """Pad `routes`: tokens behind the known ones get the experts of the last one. Nothing trained depends on them."""
    return np.concatenate([rows, rows[-1:].repeat(num_tokens - len(rows), 0)])


def _tokens(samples: Sequence[Sample]) -> torch.Tensor:
    """Return the token ids of all samples, int64 `[num_tokens]`."""
    out, start = np.empty(sum(len(s.tokens) for s in samples), np.int64), 0
    for sample in samples:
        end = start + len(sample.tokens)
        try:
            struct.pack_into(f"={end - start}q", out.data, 8 * start, *sample.tokens)
        except (struct.error, TypeError):
            out[start:end] = _ids(sample).numpy()
        start = end
    if (out < 0).any():
        for sample in samples:
            _ids(sample)
    return torch.from_numpy(out)


def _ids(sample: Sample) -> torch.Tensor:
    try:
        ids = torch.tensor(sample.tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _error(sample, f"tokens are not a list of ids: {error}", "set sample.tokens") from error
    if ids.dtype != torch.int64 or ids.dim() != 1 or bool((ids < 0).any()):
        raise _error(sample, f"tokens hold {ids.dtype} of at least {ids.min()}", "use integers from 0 as token ids")
    return ids


def _check_lengths(sample: Sample) -> None:
    """Compare the lengths again: rewards and filters may have changed the sample since it was generated."""
    n = sample.response_length
    if not n:
        what = f"the response is empty (status {sample.status.value})"
        raise _error(sample, what, "remove its group, or let the generate function keep the end-of-text token")
    if len(sample.tokens) <= n:
        what = f"{len(sample.tokens)} tokens for a response of {n}: the prompt is missing"
        raise _error(sample, what, "sample.tokens holds prompt + response ids, response_length counts the response's")
    for name in ("loss_mask", "rollout_log_probs"):
        if (values := getattr(sample, name)) is not None and len(values) != n:
            what = f"{name} has {len(values)} entries for {n} response tokens"
            raise _error(sample, what, "use sample.append_response_tokens, which keeps them aligned")


def _error(sample: Sample, what: str, remedy: str) -> RolloutError:
    return RolloutError(what, where=name_of(sample), remedy=remedy)

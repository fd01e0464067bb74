"""Groups of samples -> the flat columns that a trainer gets, checked for what training needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from instep.data.sampling import distribution_of, truncated_by
from instep.errors import RolloutError
from instep.types import Group, Sample, TokenBatch, name_of, reward_of


def build_batch(
    groups: Sequence[Group],
    *,
    reward_key: str | None = None,
    needs_reward: bool = True,
    default_temperature: float = 1.0,
    compares: str = "",
) -> TokenBatch:
    """The samples of the groups, in order. Fan-out siblings may form a list of their own inside a group.

    Token columns: `loss_mask` (1 for samples without one, 0 for those with `remove_sample`), and `rollout_log_probs` if
    any sample has them (NaN for samples without). Sample columns: `temperature` (the sample's own, else
    `default_temperature`), `rewards` (if `needs_reward`), `group_index`, `index` (-1 where unknown), and lists:
    `execution_id` (made up for a sample without one), `status`, `weight_versions`, `metadata`, `train_metadata`,
    `extra`. `index` and `group_index` are int64, the other tensors float32.

    Args:
        reward_key: the entry to take from a reward that is a dict.
        needs_reward: False for supervised fine-tuning, whose samples have no reward.
        compares: the flags that compare the engine's log-probs with the trainer's, which are of the full distribution:
            samples that the engine drew from another one are refused.

    Raises:
        RolloutError: a sample that cannot be trained on, with the reason.
        RewardError: a reward is missing or no finite number.
    """
    flat = _flatten(groups)
    if not flat:
        raise RolloutError(
            "the rollout returned no samples", remedy="return at least one group", where="--rollout-function-path"
        )
    masks: list[list[int]] = []
    log_probs: list[list[float]] = []
    rewards: list[float] = []
    temperatures: list[float] = []
    for sample, _ in flat:
        _check_tokens(sample)
        masks.append(_mask(sample))
        log_probs.append(_log_probs(sample, masks[-1]))
        temperatures.append(_temperature(sample, default_temperature, compares))
        if needs_reward:
            rewards.append(reward_of(sample, reward_key))
    samples = [sample for sample, _ in flat]
    token_columns = {"loss_mask": _column(masks)}
    if any(s.rollout_log_probs is not None for s in samples):
        token_columns["rollout_log_probs"] = _column(log_probs)
    sample_columns: dict[str, Any] = {
        "temperature": torch.tensor(temperatures, dtype=torch.float32),
        "group_index": torch.tensor([s.group_index for s in samples], dtype=torch.int64),
        "index": torch.tensor([-1 if s.index is None else s.index for s in samples], dtype=torch.int64),
        "execution_id": [execution for _, execution in flat],
        "status": [s.status.value for s in samples],
        "weight_versions": [s.weight_versions for s in samples],
        "metadata": [s.metadata for s in samples],
        "train_metadata": [s.train_metadata for s in samples],
        "extra": [s.extra for s in samples],
    }
    if needs_reward:
        sample_columns["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    return TokenBatch(
        tokens=torch.cat([_ids(s) for s in samples]),
        total_lengths=torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
        response_lengths=torch.tensor([s.response_length for s in samples], dtype=torch.int64),
        token_columns=token_columns,
        sample_columns=sample_columns,
    )


def is_older(name: str, version: int) -> bool:
    """Whether an earlier sync brought the weights `name`; a name that no sync has given is somebody else's."""
    return name.isdigit() and int(name) < version


def older_tokens(batch: TokenBatch, version: int, samples: Sequence[Sample]) -> torch.Tensor:
    """Which response tokens older weights than `version` have made, with the engine's log-prob known: 1 or 0.

    A partial rollout and a group from the buffer have such tokens. Those of an unknown version are taken for new, and
    so are those whose log-probs are of a truncated distribution (top-p, ...), no base for a ratio of the whole one.

    Args:
        samples: those of the batch, in its order.

    Returns:
        float32 `[num_response_tokens]`.
    """
    out = torch.zeros(int(batch.response_lengths.sum()))
    starts = (batch.response_lengths.cumsum(0) - batch.response_lengths).tolist()
    for start, sample in zip(starts, samples, strict=True):
        for span in sample.weight_versions if not truncated_by(sample) else ():
            if is_older(span.version, version):
                out[start + span.start : start + span.end] = 1
    known = batch.token_columns.get("rollout_log_probs")
    return out * (0 if known is None else ~known.isnan())


def _flatten(groups: Sequence[Any]) -> list[tuple[Sample, str]]:
    """The samples with their execution ids; siblings in a list of their own without one get a common id."""
    out: list[tuple[Sample, str]] = []
    for g, group in enumerate(groups):
        if not isinstance(group, list) or not group:
            raise RolloutError(
                f"group {g} of the rollout is {'empty' if group == [] else 'a ' + type(group).__name__}",
                remedy="a rollout function returns a list of groups, each a list of samples",
                where="--rollout-function-path",
            )
        for k, member in enumerate(group):
            siblings = member if isinstance(member, list) else [member]
            for s, sample in enumerate(siblings):
                if not isinstance(sample, Sample):
                    raise RolloutError(
                        f"entry {k} of group {g} of the rollout is a {type(sample).__name__}, not a Sample",
                        remedy="a rollout function returns a list of groups, each a list of samples",
                        where="--rollout-function-path",
                    )
                made_up = f"group-{g}-{k}" if siblings is member else f"sample-{g}-{k}-{s}"
                out.append((sample, made_up if sample.execution_id is None else sample.execution_id))
    return out


def _check_tokens(sample: Sample) -> None:
    if sample.group_index is None:
        raise _error(sample, "group_index is not set", "set it on every sample; groups are told by it")
    if sample.response_length < 1:
        raise _error(
            sample,
            f"the response is empty (status {sample.status.value})",
            "leave the sample's group out, or let the generate function keep at least the end-of-text token",
        )
    if len(sample.tokens) <= sample.response_length:
        raise _error(
            sample,
            f"{len(sample.tokens)} tokens for a response of {sample.response_length}: the prompt is missing",
            "sample.tokens holds prompt + response ids, response_length counts the response's",
        )
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != sample.response_length:
            raise _error(
                sample,
                f"{name} has {len(values)} entries for {sample.response_length} response tokens",
                "use sample.append_response_tokens, which keeps them aligned",
            )


def _mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    if sample.loss_mask is None:
        return [1] * sample.response_length
    if not set(sample.loss_mask) <= {0, 1}:
        wrong = next(m for m in sample.loss_mask if m not in (0, 1))
        raise _error(sample, f"loss_mask holds {wrong!r}", "a loss mask is made of 0 and 1")
    return sample.loss_mask


def _log_probs(sample: Sample, mask: list[int]) -> list[float]:
    if sample.rollout_log_probs is None:
        return [math.nan] * sample.response_length
    for t, (value, trained) in enumerate(zip(sample.rollout_log_probs, mask, strict=True)):
        if trained and (value is None or not math.isfinite(value)):
            raise _error(
                sample,
                f"rollout_log_probs[{t}] is {value}",
                "the log-prob of a trained token is a finite number; None for the whole list if they are unknown",
            )
    return [0.0 if value is None else value for value in sample.rollout_log_probs]


def _temperature(sample: Sample, default: float, compares: str) -> float:
    """The temperature of all trained tokens of a sample, whose sampling parameters are checked."""
    params = sample.sampling_params
    turns = sample.sampling_turns or [distribution_of({"temperature": default, **params})]
    value: Any = turns[0]["temperature"]
    if any(turn["temperature"] != value for turn in turns):
        raise _error(
            sample,
            f"its turns were sampled at temperatures {', '.join(str(turn['temperature']) for turn in turns)}",
            "a sample is scored at one temperature: use one for all its trained turns, append the others with "
            "trainable=False, or set sample.sampling_params and sampling_turns to what each sample was drawn with",
        )
    truncated = truncated_by(sample)
    if truncated and compares and sample.rollout_log_probs is not None:
        raise _error(
            sample,
            f"it was sampled with {', '.join(f'{name} {x!r:.40}' for name, x in truncated.items())}, so that the "
            f"engine's log-probs are of another distribution than the trainer's, which {compares} compares",
            f"sample from the full distribution, or leave {compares} out",
        )
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise _error(
            sample,
            f"it was sampled at temperature {value!r}",
            "train on samples of a temperature above 0: a greedy choice has no log-prob to learn from",
        )
    return float(value)


def _ids(sample: Sample) -> torch.Tensor:
    try:
        ids = torch.tensor(sample.tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _error(sample, f"tokens are no list of ids: {error}", "set sample.tokens") from error
    if ids.dtype != torch.int64 or ids.dim() != 1 or bool((ids < 0).any()):
        raise _error(sample, f"tokens hold {ids.dtype} of at least {ids.min()}", "token ids are integers from 0")
    return ids


def _column(lists: list[list[Any]]) -> torch.Tensor:
    return torch.cat([torch.tensor(values, dtype=torch.float32) for values in lists])


def _error(sample: Sample, what: str, remedy: str) -> RolloutError:
    return RolloutError(what, where=name_of(sample), remedy=remedy)

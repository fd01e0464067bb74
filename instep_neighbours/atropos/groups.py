"""A group from an Atropos environment: it is checked, converted into samples for a trainer, and compared as there.

Its columns are aligned with the tokens of each sequence. `masks` hold -100 where a token is not trained on, otherwise
the token. `inference_logprobs` hold 1.0 for tokens that no engine has sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from instep.arguments.settings import HookSettings
from instep.types import Group, Sample, Status, reward_of

MIN_STD = 1e-8
EXTRA = "atropos"  # the entry of Sample.extra for data without their own field
NOT_TRAINED = -100
# Entries of a group with a number for each token, beside tokens and masks.
_PER_TOKEN = ("inference_logprobs", "advantages")
_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_PLACEHOLDER = 0.5  # values above it are not log-probs, also after rounding
_OVERRIDES = frozenset({"set_advantage_to_zero", "temperature"})
_GROUP_OVERRIDES = frozenset({"temperature", "group_size"})  # the latter is for the environment itself


@dataclass(frozen=True)
class Limits:
    """What a run can train on; None: unknown.

    Attributes:
        num_tokens: the most tokens of a sequence.
        vocab_size: the number of ids with embeddings in the model.
    """

    num_tokens: int | None = None
    vocab_size: int | None = None


def size_of(group: dict[str, Any]) -> int:
    """Return the number of sequences of a group."""
    return len(group["tokens"])


def fault_of_group(group: Any) -> str:
    """Return what is wrong with the form of a group, with the name of the field; "" for a valid one."""
    if not isinstance(group, dict):
        return "a group is not a JSON object"
    for name in ("tokens", "masks", "scores"):
        if not isinstance(group.get(name), list) or not group[name]:
            return f"{name} is not a list with an entry for each sequence"
    tokens, masks, scores = group["tokens"], group["masks"], group["scores"]
    if not len(tokens) == len(masks) == len(scores):
        return f"{len(tokens)} tokens, {len(masks)} masks and {len(scores)} scores, where each sequence has one of each"
    for i, (ids, mask, score) in enumerate(zip(tokens, masks, scores, strict=True)):
        if not isinstance(ids, list) or len(ids) < 2 or any(type(t) is not int or t < 0 for t in ids):
            return f"tokens[{i}] is not a list of at least two token ids"
        if not isinstance(mask, list) or len(mask) != len(ids):
            return f"masks[{i}] is not a list of {len(ids)} entries, one for each token"
        for t, (m, token) in enumerate(zip(mask, ids, strict=True)):
            if m not in (NOT_TRAINED, token):
                return f"masks[{i}][{t}] is {m!r:.40}, neither {NOT_TRAINED} nor the token {token}"
        if not _is_number(score):
            return f"scores[{i}] is {score!r:.40}, not a finite number"
    for name in _PER_TOKEN:
        rows = group.get(name) or []
        if not isinstance(rows, list) or len(rows) not in (0, len(tokens)):
            return f"{name} is not a list of {len(tokens)} entries, one for each sequence"
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) not in (0, len(tokens[i])) or not all(map(_is_number, row)):
                return f"{name}[{i}] is not a list of {len(tokens[i])} finite numbers, one for each token"
    for name, kind in (("overrides", list), ("group_overrides", dict), ("generation_params", dict), ("messages", list)):
        if group.get(name) is not None and not isinstance(group[name], kind):
            return f"{name} is a {type(group[name]).__name__}, not a {kind.__name__}"
    wrong = [i for i, override in enumerate(group.get("overrides") or []) if not isinstance(override, dict)]
    return f"overrides[{wrong[0]}] is not an object" if wrong else ""


def _holds(value: Any) -> bool:
    """Return whether a field has content: environments send lists without entries, too."""
    return any(map(_holds, value)) if isinstance(value, list) else value is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def refused_in(group: dict[str, Any], limits: Limits, *, takes_advantages: bool) -> str:
    """Return why this run cannot train on a group of valid form; "" if it can.

    Args:
        takes_advantages: the run uses the advantages of the groups (`advantages`).
    """
    if _holds(group.get("distill_token_ids")) or _holds(group.get("distill_logprobs")):
        return "distill_token_ids and distill_logprobs: distillation from an environment's teacher is not supported"
    if _holds(group.get("images")):
        return "images: training on images is not supported"
    if _holds(group.get("advantages")) and not takes_advantages:
        flag = "--custom-advantage-function-path instep_neighbours.atropos.advantages"
        return f"advantages of tokens, which only {flag} uses"
    for i, ids in enumerate(group["tokens"]):
        if limits.num_tokens is not None and len(ids) > limits.num_tokens:
            return f"tokens[{i}] has {len(ids)} tokens, more than the {limits.num_tokens} of this run"
        if limits.vocab_size is not None and max(ids) >= limits.vocab_size:
            return (
                f"tokens[{i}] has the id {max(ids)}, but the model has {limits.vocab_size}: the environment's "
                "tokenizer_name is not the run's model"
            )
    try:
        for i in range(size_of(group)):
            _log_probs(group, i)
            temperature_of(group, i, 1.0)
    except ValueError as error:
        return str(error)
    return ""


def samples_of(group: dict[str, Any], group_index: int, first_index: int, *, temperature: float = 1.0) -> Group:
    """Return the samples of a group of valid form, one for each sequence, in its order.

    The response starts with the first trained token (never the first of all: nothing predicts it) and ends with the
    sequence. Tokens between trained parts have the mask 0. A sequence without a trained token still counts in the
    statistics of its group, with a response of one masked token. Texts are empty.

    Args:
        temperature: of groups without one.
    """
    unused = _unused(group)
    messages, out = group.get("messages") or [], []
    advantages = group.get("advantages") or []
    for i, (ids, mask, score) in enumerate(zip(group["tokens"], group["masks"], group["scores"], strict=True)):
        trained = [t > 0 and m != NOT_TRAINED for t, m in enumerate(mask)]
        first = trained.index(True) if any(trained) else len(ids) - 1
        log_probs = _log_probs(group, i)
        sample = Sample(
            group_index=group_index,
            index=first_index + i,
            execution_id=f"{group_index}.{i}",
            tokens=ids,
            response_length=len(ids) - first,
            reward=float(score),
            loss_mask=[int(t) for t in trained[first:]],
            rollout_log_probs=log_probs and log_probs[first:],
            status=Status.COMPLETED,
            sampling_params={"temperature": temperature_of(group, i, temperature), **_truncation(group)},
            begun_version=0,  # its weight version is unknown: as old as possible
        )
        zero = bool(_overrides(group, i).get("set_advantage_to_zero", False))
        sample.extra[EXTRA] = {"env_id": group.get("env_id"), "zero": zero, **unused}
        if i < len(messages):
            sample.metadata["messages"] = messages[i]
        if i < len(advantages) and advantages[i]:
            sample.extra[EXTRA]["advantages"] = advantages[i][first:]
        out.append(sample)
    return out


def temperature_of(group: dict[str, Any], i: int, default: float) -> float:
    """Return the temperature for scoring sequence `i`: its override's, otherwise the generation's, otherwise the
    group's.

    As in Atropos' trainer, 0 and less count as 1.

    Raises:
        ValueError: it is not a finite number.
    """
    places = (_overrides(group, i), group.get("generation_params") or {}, group.get("group_overrides") or {})
    given = next((place["temperature"] for place in places if place.get("temperature") is not None), default)
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the temperature of sequence {i} is {given!r:.40}, not a finite number")
    return value if value > 0 else 1.0


def _overrides(group: dict[str, Any], i: int) -> dict[str, Any]:
    given = group.get("overrides") or []
    return given[i] if i < len(given) else {}


def _truncation(group: dict[str, Any]) -> dict[str, Any]:
    """Return the other parameters of the environment's sampling distribution."""
    given = group.get("generation_params") or {}
    return {name: given[name] for name in _SAMPLING if given.get(name) is not None}


def _log_probs(group: dict[str, Any], i: int) -> list[float] | None:
    """Return the engine's log-probs of sequence `i`, 0 where it is not trained on; None if they are unknown.

    Raises:
        ValueError: some trained tokens have a log-prob, others the placeholder.
    """
    rows = group.get("inference_logprobs") or []
    row = rows[i] if rows else []
    trained = {t: row[t] for t, m in enumerate(group["masks"][i]) if row and t > 0 and m != NOT_TRAINED}
    missing = [t for t, value in trained.items() if value > _PLACEHOLDER]
    if not row or (trained and len(missing) == len(trained)):
        return None
    if missing:
        what = f"inference_logprobs[{i}][{missing[0]}] is {row[missing[0]]}"
        raise ValueError(f"{what}, not a log-prob, but the token is trained on")
    return [float(trained.get(t, 0.0)) for t in range(len(row))]


def _unused(group: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides that have no effect here, by name."""
    given = {name for one in group.get("overrides") or [] for name in one} - _OVERRIDES
    given |= (group.get("group_overrides") or {}).keys() - _GROUP_OVERRIDES
    if _holds(group.get("ref_logprobs")):
        given.add("ref_logprobs")
    return {"unused": sorted(given)} if given else {}


# ---- advantages as in Atropos' trainer, for two hooks ----------------------------------------------------------------


def normalized_scores(args: HookSettings, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Return the scores, and (score - mean) / max(std, 1e-8) within each group, with the std of the population.

    As in Atropos' example_trainer, a group of one keeps its score. Samples with `set_advantage_to_zero` count in mean
    and std.
    """
    scores = [reward_of(sample) for sample in samples]
    members: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group_index, []).append(i)
    out = list(scores)
    for group in members.values():
        if len(group) > 1:
            mean = math.fsum(scores[i] for i in group) / len(group)
            std = math.sqrt(math.fsum((scores[i] - mean) ** 2 for i in group) / len(group))
            for i in group:
                out[i] = (scores[i] - mean) / max(std, MIN_STD)
    for i, sample in enumerate(samples):
        if sample.extra.get(EXTRA, {}).get("zero"):
            out[i] = 0.0
    return scores, out


def advantages(args: HookSettings, rollout_data: dict[str, Any]) -> None:
    """Set `rollout_data["advantages"]`: those of a group's tokens if it has them, otherwise its normalized scores."""
    import torch

    samples, lengths = rollout_data["samples"], rollout_data["response_lengths"]
    values = normalized_scores(args, samples)[1]
    rows = []
    for sample, value, length in zip(samples, values, lengths, strict=True):
        given = None if sample.extra.get(EXTRA, {}).get("zero") else sample.extra.get(EXTRA, {}).get("advantages")
        rows.append(torch.full((length,), value) if given is None else torch.tensor(given, dtype=torch.float32))
    rollout_data["advantages"] = rows

"""Plain data types: `Sample` for rollout functions, and `TokenBatch` with flat columns for trainers."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from instep.errors import RewardError
from instep.system.hooks.user_code import said

if TYPE_CHECKING:
    import torch


class Status(StrEnum):
    """How a sample's generation ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class VersionSpan:
    """Response tokens [start, end) were sampled from weights `version`."""

    version: str
    start: int
    end: int


_Status = Status  # `Sample.Status` below hides the name inside the class
# The status of a sample by the engine's finish reason.
_ENDINGS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED, "cancelled": Status.ABORTED}


def _flag(status: Status) -> Any:
    """Return a property of a sample that says whether it has this status."""

    def put(sample: Sample, value: bool) -> None:
        if value:
            sample.status = status
        elif sample.status in (Status.PENDING, status):
            sample.status = Status.COMPLETED

    return property(lambda sample: sample.status is status, put)


@dataclass
class Sample:
    """One prompt and one response.

    `tokens` are the ids of prompt and response; `response_length` counts the ids of the response. Per-token lists
    (`loss_mask`, `rollout_log_probs`) have `response_length` entries, or are None if they are unknown.
    `rollout_routed_experts` (`routes.py`) are the experts that the engine chose for prompt and response.
    """

    Status: ClassVar[type[_Status]] = _Status

    group_index: int | None = None
    index: int | None = None
    execution_id: str | None = None  # one run of a generate function; fan-out siblings share it
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None  # [num_tokens - 1, num_layers, experts per token], of small integers
    weight_versions: list[VersionSpan] = field(default_factory=list)
    status: _Status = _Status.PENDING
    sampling_params: dict[str, Any] = field(default_factory=dict)  # as last sent to the engine
    sampling_turns: list[dict[str, Any]] = field(default_factory=list)  # the distributions of its tokens
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None  # passed to the trainer unchanged
    session_id: str | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    non_generation_time: float = 0.0
    begun_version: int | None = None  # of the engines when its first token was requested; see `version_spans`
    extra: dict[str, Any] = field(default_factory=dict)  # unknown fields, kept

    # Older spellings of `status` and `execution_id` in slime and vime.
    truncated = _flag(_Status.TRUNCATED)
    aborted = _flag(_Status.ABORTED)

    @property
    def rollout_id(self) -> str | None:
        return self.execution_id

    @rollout_id.setter
    def rollout_id(self, value: Any) -> None:
        self.execution_id = None if value is None else str(value)

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def version_spans(self) -> list[VersionSpan]:
        """`weight_versions`, and `begun_version` for other trainable parts: their weights are at least this new."""
        if self.begun_version is None:
            return self.weight_versions
        out, end = list[VersionSpan](), 0
        for span in [*self.weight_versions, VersionSpan("", self.response_length, self.response_length)]:
            if end < span.start and (self.loss_mask is None or any(self.loss_mask[end : span.start])):
                out.append(VersionSpan(str(self.begun_version), end, span.start))
            out += [span] if span.start < span.end else []
            end = max(end, span.end)
        return out

    @property
    def effective_response_length(self) -> int:
        """The number of response tokens that the loss mask keeps."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward. If it is a dict and `args.reward_key` is set, return this entry."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, dict) else self.reward

    def append_response_tokens(
        self,
        tokens_or_args: Any = None,
        log_probs: Iterable[float] | None = None,
        *,
        tokens: Iterable[int] | None = None,
        trainable: bool = True,
        weight_versions: Sequence[VersionSpan] = (),
        routed_experts: Any = None,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens, and keep ids, mask, log-probs and versions aligned.

        Tokens of a tool or an environment are `trainable=False`: their mask and log-prob are 0.

        Args:
            tokens_or_args: the token ids. Functions for slime pass `args` here, and the ids as `tokens`.
            weight_versions: positions count from the first token of this call.
            routed_experts: rows `[_, num_layers, experts per token]` of the tokens up to the last but one. They begin
                with the first token of the sample, or with the first token whose row is missing.
            meta_info: the engine's information about these tokens: `weight_version`, and `finish_reason` ("stop",
                "length", "abort", or a dict with that as its `type`). The latter sets the status if
                `update_terminal_info`.
            text: text to append to `response`.

        Raises:
            ValueError: only some trainable parts have log-probs, or lengths differ.
        """
        given = tokens_or_args if tokens is None and isinstance(tokens_or_args, Iterable) else tokens
        ids = [] if given is None else _plain(given, int)
        values = None if log_probs is None else _plain(log_probs, float)
        said = meta_info or {}
        if "weight_version" in said and ids and not weight_versions:  # instep's engines also report it per token
            whole = {"version": str(said["weight_version"]), "start": 0, "end": len(ids)}
            weight_versions = [VersionSpan(**span) for span in said.get("weight_versions", [whole])]
        self.append_plain(ids, values, weight_versions, routed_experts, trainable=trainable)
        self.response += text or ""
        reason = said.get("finish_reason") if update_terminal_info else None
        reason = reason.get("type") if isinstance(reason, dict) else reason
        self.status = _ENDINGS.get(str(reason), self.status)

    def append_plain(
        self,
        ids: list[int],
        values: list[float] | None,
        weight_versions: Sequence[VersionSpan] = (),
        routed_experts: Any = None,
        *,
        trainable: bool = True,
    ) -> None:
        """Append as `append_response_tokens`, but only lists of plain Python numbers, as in engines' answers."""
        from instep.models import routes  # which imports numpy

        self._check_append(len(ids), values, trainable)
        n, before = len(ids), self.response_length
        known = self.routes_that_hold()
        if routed_experts is not None and n:
            known = routes.extended(known, routed_experts, len(self.tokens) + n)
        self.rollout_routed_experts = known
        if self.loss_mask is None:
            self.loss_mask = [1] * before
        self.loss_mask.extend([int(trainable)] * n)
        if trainable and values is not None:
            self.rollout_log_probs = (self.rollout_log_probs or [0.0] * before) + values
        elif self.rollout_log_probs is not None:
            self.rollout_log_probs.extend([0.0] * n)
        self.tokens = list(self.tokens) + ids
        self.response_length = before + n
        for span in weight_versions:
            start, end = before + span.start, before + span.end
            last = self.weight_versions[-1] if self.weight_versions else None
            if last is not None and last.version == span.version and last.end == start:
                last.end = end
            else:
                self.weight_versions.append(VersionSpan(span.version, start, end))

    def routes_that_hold(self) -> Any:
        """Return the rows of `rollout_routed_experts` that stay when tokens are appended, or None.

        A generate function may have shortened `tokens`, or replaced them and dropped the response. The last token's row
        comes with the answer that adds the next token.
        """
        known = self.rollout_routed_experts
        return None if known is None or not self.response_length else known[: max(0, len(self.tokens) - 1)]

    def _check_append(self, n: int, log_probs: list[float] | None, trainable: bool) -> None:
        """Raise a ValueError if the columns would have different lengths after `n` more tokens."""
        before = self.response_length
        if log_probs is not None and not trainable:
            raise ValueError("log-probs are given, but tokens that are not trainable must have no log-probs")
        if log_probs is not None and len(log_probs) != n:
            raise ValueError(f"{n} tokens but {len(log_probs)} log-probs")
        for name in ("loss_mask", "rollout_log_probs"):
            column = getattr(self, name)
            if column is not None and len(column) != before:
                raise ValueError(f"{name} has {len(column)} entries for {before} response tokens")
        trained_before = before > 0 and (self.loss_mask is None or any(self.loss_mask))
        mixed = (log_probs is None) != (self.rollout_log_probs is None)
        if trainable and n and mixed and (trained_before or self.rollout_log_probs is not None):
            raise ValueError("log-probs must be given for all trainable parts of a response, or for no part")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the attributes set by hooks as plain values. Routed experts become a text."""
        from instep.models import routes

        known = {f.name for f in dataclasses.fields(self)}
        out = {name: copy.copy(getattr(self, name)) for name in known - {"extra"}}
        if own := {name: value for name, value in vars(self).items() if name not in known}:  # set by hooks
            out |= {**own, "hook_attributes": list(own)}
        if self.rollout_routed_experts is not None:
            out["rollout_routed_experts"] = routes.encode(self.rollout_routed_experts)
        spans = [dataclasses.asdict(s) for s in self.weight_versions]
        return {**self.extra, **out, "status": self.status.value, "weight_versions": spans}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        kwargs = {k: v for k, v in data.items() if k in known}
        kwargs["status"] = Status(kwargs.get("status", "pending"))
        spans = kwargs.pop("weight_versions", [])
        sample = cls(**kwargs)
        if isinstance(sample.rollout_routed_experts, str):
            from instep.models import routes

            sample.rollout_routed_experts = routes.decode(sample.rollout_routed_experts)
        if all(isinstance(s, dict) for s in spans):
            sample.weight_versions = [VersionSpan(**s) for s in spans]
        elif len(spans) == 1:  # slime and vime save only names, so tokens of several versions cannot be separated
            sample.weight_versions = [VersionSpan(str(spans[0]), 0, sample.response_length)]
        else:
            sample.extra["weight_versions"] = spans
        for name, value in data.items():
            if name in ("truncated", "aborted", *data.get("hook_attributes", ())):
                setattr(sample, name, value)
            elif name not in known and name != "hook_attributes":
                sample.extra[name] = value
        return sample


def _plain(values: Iterable[Any], kind: type) -> list[Any]:
    """Return `values` as plain Python numbers."""
    values = list(values)
    return values if {kind}.issuperset(map(type, values)) else list(map(kind, values))


Group = list[Sample]


def name_of(sample: Sample) -> str:
    """Return the name of a sample for errors."""
    return f"group {sample.group_index}, sample {sample.index}"


def as_number(value: Any) -> float | None:
    """Return a finite real number (Python's, numpy's or a tensor's) as float; None for anything else."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # noqa: BLE001 - the boundary to a user's object: its __float__ may raise any error
        return None
    return number if math.isfinite(number) else None


def reward_of(sample: Sample, key: str | None = None) -> float:
    """Return the sample's reward as one number; for a dict, the entry `key` (`--reward-key`, `--eval-reward-key`).

    Raises:
        RewardError: there is no reward, the dict has no such entry, or the value is not a finite number.
    """
    value: Any = sample.reward
    if isinstance(value, dict):
        if key is None or key not in value:
            what = f"the reward is a dict with {', '.join(sorted(map(str, value))) or 'no keys'}"
            remedy = f"--reward-key must name one of these{'' if key is None else f', not {key!r}'}"
            raise RewardError(what, where=name_of(sample), remedy=remedy)
        value = value[key]
    if (number := as_number(value)) is None:
        remedy = "return a finite number from the reward function, such as 0.0 if there is nothing to judge"
        remedy = remedy if value is not None else "set sample.reward, --rm-type or --custom-rm-path"
        raise RewardError(f"the reward {said(value)} is not a finite number", where=name_of(sample), remedy=remedy)
    return number


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function for training: groups of samples, and metrics of the function."""

    samples: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RolloutFnEvalOutput:
    """The result of a rollout function for evaluation: `rewards`, `truncated` and `samples` by name of the data set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class TokenBatch:
    """Samples as flat columns: a rollout for the trainer, a micro-batch, or the probe of a sync.

    Attributes:
        tokens: int64 `[num_tokens]`, prompt + response of each sample in order.
        total_lengths: int64 `[num_samples]`.
        response_lengths: int64 `[num_samples]`. A response ends its sample, and is at least one token shorter.
        token_columns: float32 `[num_response_tokens]` each, responses in order. Columns of instep: `loss_mask`,
            `loss_weights` (mask over the step's denominator), `rollout_log_probs`, `log_probs` (old), `ref_log_probs`,
            `advantages`, `returns`, `older` (1: sampled from other weights than the rollout's).
        sample_columns: `[num_samples]` tensors or lists: `temperature`, `rewards`, `group_index`, users' columns ...
        host: for a batch that `to` has made: the original batch with the same samples.
    """

    tokens: torch.Tensor
    total_lengths: torch.Tensor
    response_lengths: torch.Tensor
    token_columns: dict[str, torch.Tensor] = field(default_factory=dict)
    sample_columns: dict[str, Any] = field(default_factory=dict)
    host: TokenBatch | None = field(default=None, repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        return self.total_lengths.numel()

    @property
    def on_host(self) -> TokenBatch:
        """The samples before they were moved to a device. Reading a length here does not wait for the device."""
        return self if self.host is None else self.host

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """Return the samples `indices`, in that order; those side by side are copied as whole pieces."""
        import torch

        where = torch.as_tensor(list(indices), dtype=torch.int64)
        runs = [[i for _, i in run] for _, run in groupby(enumerate(where.tolist()), lambda pair: pair[1] - pair[0])]

        def taken(lengths: torch.Tensor, columns: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            ends = [0, *lengths.cumsum(0).tolist()]
            pieces = [slice(ends[run[0]], ends[run[-1] + 1]) for run in runs] or [slice(0)]
            return [torch.cat([x[piece] for piece in pieces]) for x in columns]

        (tokens,) = taken(self.total_lengths, [self.tokens])
        columns = dict(zip(self.token_columns, taken(self.response_lengths, self.token_columns.values()), strict=True))
        given = self.sample_columns.items()
        of_samples = {k: v[where] if isinstance(v, torch.Tensor) else [v[i] for i in indices] for k, v in given}
        return TokenBatch(tokens, self.total_lengths[where], self.response_lengths[where], columns, of_samples)

    def without_routes(self) -> TokenBatch:
        """Return the batch without routed experts, for a model that chooses its own experts."""
        columns = {name: column for name, column in self.sample_columns.items() if not name.endswith("_experts")}
        return dataclasses.replace(self, sample_columns=columns)

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return a copy with its tensors on `device`. Lists are not changed."""
        import torch

        def move(x: Any) -> Any:
            return x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x

        tokens, lengths, responses = map(move, (self.tokens, self.total_lengths, self.response_lengths))
        of_tokens, of_samples = ({k: move(v) for k, v in x.items()} for x in (self.token_columns, self.sample_columns))
        return TokenBatch(tokens, lengths, responses, of_tokens, of_samples, self.on_host)


# steps -> data-parallel ranks -> micro-batches -> indices of samples; ranks of a step have equally many micro-batches
Schedule = list[list[list[list[int]]]]

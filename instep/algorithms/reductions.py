"""The reduction of token losses to one number per optimizer step, independent of micro-batches and ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.algorithms.advantages.groups import executions
from instep.algorithms.segments import Lengths


def loss_weights(
    loss_mask: Tensor,
    response_lengths: Lengths,
    step_of_sample: Sequence[int],
    execution_ids: Sequence[Hashable | None] | None = None,
    *,
    per_token: bool = False,
    constant_length: int | None = None,
    tokens_of_execution: Tensor | None = None,
) -> Tensor:
    """Divide the mask by the denominator of the optimizer step; the step's loss is sum(weights * token_loss).

    Default: 1 / (G * tokens of the execution), where G counts the executions of the step (fully masked ones too) and
    the tokens are those with mask 1 of all samples of the execution: the mean over executions of token means (GRPO,
    arXiv:2402.03300, eq. 3). `per_token`: 1 / (all tokens with mask 1 of the step) (DAPO, arXiv:2503.14476, eq. 8).
    `constant_length` L: 1 / (G * L), so a token has the same weight in long and short responses, in every step (Dr.
    GRPO, arXiv:2503.20783, listing 1).

    Args:
        loss_mask: `[num_response_tokens]`, 0 or 1, samples in order.
        response_lengths: of each sample.
        step_of_sample: the optimizer step of each sample; -1 for a sample of no step, whose weights are 0.
        execution_ids: of each sample; fan-out siblings share one, None is a separate execution.
        tokens_of_execution: `[num_samples]`, of each sample's execution; needed if they must not be counted here: a
            user's conversion may drop samples of it.

    Returns:
        `[num_response_tokens]` in the dtype of `loss_mask`.

    Raises:
        ValueError: lengths do not fit, an execution is split over steps, or two reductions are set.
    """
    if constant_length is not None and (per_token or constant_length < 1):
        raise ValueError(f"constant_length {constant_length} must be positive, and not used with per_token")
    lengths = [int(n) for n in response_lengths]
    counts = _counts(loss_mask, lengths, step_of_sample, execution_ids)

    def scale(counted: float, step: int) -> float:
        if step < 0:
            return 0.0
        if per_token:
            return 1.0 / max(counts.tokens_of_step[step], 1.0)
        tokens = constant_length or max(counted, 1.0)
        return 1.0 / (counts.executions_of_step[step] * tokens)

    counted = [counts.tokens_of_execution[execution] for execution in counts.execution_of_sample]
    counted = counted if tokens_of_execution is None else tokens_of_execution.tolist()
    scales = [scale(tokens, step) for tokens, step in zip(counted, step_of_sample, strict=True)]
    # Rounded before the multiplication by 0 or 1: the result is the same, in a third of the memory.
    per_sample = torch.tensor(scales, dtype=torch.float64).to(loss_mask)
    return per_sample.repeat_interleave(torch.tensor(lengths, device=loss_mask.device).long()).mul_(loss_mask)


def loss_scales(
    loss_mask: Tensor,
    response_lengths: Lengths,
    step_of_sample: Sequence[int],
    execution_ids: Sequence[Hashable | None] | None = None,
    *,
    per_token: bool = False,
) -> Tensor:
    """Return the factor of `loss_weights` that all samples of a step share, for losses that users reduce themselves.

    It is 1 / G, with `per_token` 1 / (all tokens with mask 1 of the step), and 0 for a sample without a step. The
    arguments are those of `loss_weights`.

    Returns:
        `[num_samples]`, float32.
    """
    counts = _counts(loss_mask, [int(n) for n in response_lengths], step_of_sample, execution_ids)
    by_step = counts.tokens_of_step if per_token else counts.executions_of_step
    return torch.tensor([0.0 if s < 0 else 1.0 / max(by_step[s], 1.0) for s in step_of_sample])


class _Counts(NamedTuple):
    execution_of_sample: list[Hashable]
    tokens_of_execution: dict[Hashable, float]
    tokens_of_step: dict[int, float]
    executions_of_step: dict[int, int]


def _counts(
    loss_mask: Tensor,
    lengths: list[int],
    step_of_sample: Sequence[int],
    execution_ids: Sequence[Hashable | None] | None,
) -> _Counts:
    if len(step_of_sample) != len(lengths) or sum(lengths) != loss_mask.numel():
        raise ValueError(
            f"{loss_mask.numel()} mask entries, {len(step_of_sample)} steps and {len(lengths)} response lengths "
            f"(sum {sum(lengths)}) do not fit together"
        )
    ids = executions(execution_ids, len(lengths))
    of_samples = torch.tensor(lengths, dtype=torch.int64, device=loss_mask.device)
    tokens_of_sample = torch.segment_reduce(loss_mask, "sum", lengths=of_samples).tolist()  # whole numbers: exact
    step_of_execution: dict[Hashable, int] = {}
    tokens_of_execution: dict[Hashable, float] = defaultdict(float)
    tokens_of_step: dict[int, float] = defaultdict(float)
    for execution, step, tokens in zip(ids, step_of_sample, tokens_of_sample, strict=True):
        if step_of_execution.setdefault(execution, step) != step:
            raise ValueError(f"execution {execution!r} is split over steps {step_of_execution[execution]} and {step}")
        tokens_of_execution[execution] += tokens
        tokens_of_step[step] += tokens
    return _Counts(ids, tokens_of_execution, tokens_of_step, Counter(step_of_execution.values()))

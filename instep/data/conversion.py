"""The result of a `--custom-convert-samples-to-train-data-path` function, slime's dict of lists, read and checked.

The fields that training knows become those of samples, and `build_batch` checks them as usual. Any other field becomes
a sample column of its name, which reaches custom losses unchanged.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from instep.errors import RolloutError
from instep.system.hooks import Hook
from instep.system.hooks.user_code import said
from instep.types import Sample, as_number

logger = logging.getLogger(__name__)
FLAG = "--custom-convert-samples-to-train-data-path"
_REQUIRED = ("tokens", "response_lengths", "loss_masks")
_REWARDS = ("rewards", "raw_reward")
_NUMBERS = (*_REWARDS, "rollout_mask_sums")
_PER_TOKEN = ("loss_masks", "rollout_log_probs", "teacher_log_probs")
_PLAIN = (  # fields that are Python numbers, or lists of them
    *("tokens", "response_lengths", "total_lengths", "sample_indices", "rollout_ids", "truncated"),
    *(*_NUMBERS, *_PER_TOKEN),
)
_OF_SAMPLES = {*_PLAIN, "rollout_routed_experts", "multimodal_train_inputs"} - {*_NUMBERS}  # no columns of their name
_MADE = (  # columns that a batch has or gets: a field of such a name would replace them
    *("loss_mask", "loss_weights", "loss_scale", "log_probs", "ref_log_probs", "values", "advantages", "returns"),
    *("temperature", "index", "group_index", "execution_id", "status", "weight_versions", "extra", "routed_experts"),
    *("older", "fresh", "unconcat_tokens", "samples", "kl"),
)


@dataclass(frozen=True)
class Conversion:
    """The rows that replace a rollout's samples in training.

    Attributes:
        samples: one for each row, in order.
        sources: for each row, the number of the rollout's sample with its tokens; -1 for a row with other tokens.
        token_columns, sample_columns: the columns of the rows beyond those of samples.
    """

    samples: list[Sample]
    sources: list[int]
    token_columns: dict[str, torch.Tensor]
    sample_columns: dict[str, Any]


def read_conversion(
    hook: Hook, answer: Any, samples: Sequence[Sample], *, needs_reward: bool, global_batch_size: int
) -> Conversion:
    """Read and check the result of `hook`: a dict of lists with one entry for each row that is trained on.

    `tokens`, `response_lengths` and `loss_masks` are required, and with rewards also `rewards`, from which advantages
    are computed. `sample_indices` name the sample of each row; without them there must be as many rows as samples. What
    the dict omits comes from that sample: `truncated`, `rollout_ids` (executions), `metadata` (as `train_metadata`),
    and for a row with its tokens `rollout_log_probs` and `rollout_routed_experts`. Executions at the end that do not
    fill an optimizer step are left out, as in slime.

    Args:
        samples: the samples of the rollout, in order.

    Raises:
        RolloutError: a field is missing, has a wrong length or type, or a name that training uses. The error names it.
    """
    fields = _fields(hook, answer, _REQUIRED + (_REWARDS[:1] if needs_reward else ()))
    for name in _REWARDS[: 0 if needs_reward else 2]:
        fields.pop(name, None)
    for name in (name for name in _NUMBERS if name in fields):
        fields[name] = [_number(hook, name, i, value) for i, value in enumerate(fields[name])]
    numbers = _sources(hook, fields, samples)
    ids = fields.get("rollout_ids") or [None] * len(numbers)
    ids = [samples[n].execution_id if given is None else given for n, given in zip(numbers, ids, strict=True)]
    executions = [f"sample-{n}" if e is None else str(e) for n, e in zip(numbers, ids, strict=True)]
    kept = _whole_steps(hook, executions, global_batch_size)
    rows, sources = [], []
    for i in kept:
        row = {name: fields[name][i] for name in (*_OF_SAMPLES, *_REWARDS, "metadata") if name in fields}
        sample, same = _sample(hook, row, i, samples[numbers[i]])
        sample.execution_id = executions[i]
        rows.append(sample)
        sources.append(numbers[i] if same else -1)
    columns: dict[str, Any] = {
        name: column[kept] if isinstance(column, torch.Tensor) else [column[i] for i in kept]
        for name, column in fields.items()
        if name not in _OF_SAMPLES
    }
    columns |= {name: torch.tensor(columns[name], dtype=torch.float32) for name in _NUMBERS if name in columns}
    teacher = fields.get("teacher_log_probs")
    known = {} if teacher is None else {"teacher_log_probs": [x for i in kept for x in teacher[i]]}
    return Conversion(rows, sources, {name: torch.tensor(x, dtype=torch.float32) for name, x in known.items()}, columns)


def _fields(hook: Hook, answer: Any, required: Sequence[str]) -> dict[str, Any]:
    """Return the fields by name, without those that are None: lists, or the user's tensors, all of the same length."""
    if not isinstance(answer, Mapping):
        raise hook.wrong(answer, f"a dict of lists, one entry for each sample: {', '.join(required)}, ...")
    given = {str(name): column for name, column in answer.items() if column is not None}
    for name in required:
        if name not in given:
            raise _wrong(hook, name, "it is missing", f"return {', '.join(required)}")
    out: dict[str, Any] = {}
    for name, column in {"tokens": given["tokens"], **given}.items():  # the other lengths are compared with it
        if name in _MADE:
            raise _wrong(hook, name, "training makes a column of this name", "give the field another name")
        with hook.reading(column, "lists with one entry for each row", f"field {name}"):
            if not isinstance(column, (list, tuple, np.ndarray, torch.Tensor)):
                raise TypeError(f"a {type(column).__name__} is not a list")
            out[name] = _column(name, column)
        if len(column) != len(given["tokens"]) or not len(column):
            what = f"it has {len(column)} entries for {len(given['tokens'])} rows of tokens"
            raise _wrong(hook, name, what, "give every field one entry for each row, and return at least one row")
    if any(inputs is not None for inputs in out.get("multimodal_train_inputs", ())):
        raise _wrong(hook, "multimodal_train_inputs", "images and audio are not supported yet", "train on text")
    return out


def _column(name: str, column: Any) -> Any:
    arrays = (np.ndarray, torch.Tensor)
    if isinstance(column, arrays) and not column.ndim:
        raise TypeError("one number is not a list")
    if name in _PLAIN:
        rows = column.tolist() if isinstance(column, arrays) else column
        return [row.tolist() if isinstance(row, (*arrays, np.generic)) else row for row in rows]
    if isinstance(column, torch.Tensor):
        return column.detach().cpu()
    # A view would be sent to the workers with all of its storage.
    return [row.detach().cpu().clone() if isinstance(row, torch.Tensor) else row for row in column]


def _sources(hook: Hook, fields: Mapping[str, Any], samples: Sequence[Sample]) -> list[int]:
    """Return the number of the sample that each row was made from."""
    tokens, indices = fields["tokens"], fields.get("sample_indices")
    if indices is None and len(tokens) != len(samples):
        what = f"it is missing, and there are {len(tokens)} rows for {len(samples)} samples"
        raise _wrong(hook, "sample_indices", what, "return the index of the sample that each row was made from")
    if indices is None or indices == [s.index for s in samples]:
        return list(range(len(samples)))
    of_index: dict[Any, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        of_index[sample.index].append(number)
    out = []
    for i, index in enumerate(indices):
        found = of_index.get(index, []) if isinstance(index, int) else []
        if not found:
            what = f"[{i}] is {said(index, 40)}, the index of no sample of the rollout"
            raise _wrong(hook, "sample_indices", what, "return sample.index of the sample that each row was made from")
        out.append(next((n for n in found if samples[n].tokens == tokens[i]), found[0]))  # siblings share an index
    return out


def _whole_steps(hook: Hook, executions: Sequence[str], size: int) -> list[int]:
    """Return the rows of the executions that fill optimizer steps of `size`."""
    order = list(dict.fromkeys(executions))
    whole = len(order) // size * size
    if not whole:
        what = f"{len(order)} executions are fewer than the {size} of an optimizer step"
        raise _wrong(hook, "rollout_ids", what, "return more, or lower --global-batch-size")
    if whole < len(order):
        what = "%s: %d executions are not a multiple of --global-batch-size %d: the last %d are not trained on"
        logger.warning(what, hook, len(order), size, len(order) - whole)
    trained = set(order[:whole])
    return [i for i, execution in enumerate(executions) if execution in trained]


def _sample(hook: Hook, row: Mapping[str, Any], i: int, source: Sample) -> tuple[Sample, bool]:
    """Return the sample of a row, and whether it has the tokens of its source.

    The sample is a copy of its source, with the row's fields.
    """
    tokens, length = row["tokens"], row["response_lengths"]
    if not isinstance(tokens, (list, tuple)):
        raise _wrong(hook, "tokens", f"[{i}] is {said(tokens, 40)}", "return a list of token ids for each row")
    if not isinstance(length, int) or not 0 < length < len(tokens):
        what = f"[{i}] is {said(length, 40)} of {len(tokens)} tokens"
        raise _wrong(hook, "response_lengths", what, "count the tokens after the prompt; both have at least one")
    for name in _PER_TOKEN:
        values = row.get(name)
        if (values is None and name in row and name != "rollout_log_probs") or (
            values is not None and (not isinstance(values, (list, tuple)) or len(values) != length)
        ):
            got = f"{len(values)} entries" if isinstance(values, (list, tuple)) else said(values, 40)
            raise _wrong(hook, name, f"[{i}] is {got} for {length} response tokens", "return one for each of them")
    if others := [m for m in row["loss_masks"] if m not in (0, 1)]:
        raise _wrong(hook, "loss_masks", f"[{i}] holds {said(others[0], 40)}", "return masks of 0 and 1")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in row.get("teacher_log_probs", ())):
        raise _wrong(hook, "teacher_log_probs", f"[{i}] is not finite", "return the log-prob of each response token")
    out = copy.copy(source)  # with attributes that other hooks have set
    out.tokens, out.response_length = tokens if isinstance(tokens, list) else list(tokens), length
    out.loss_mask, out.remove_sample = row["loss_masks"], False  # the mask covers this
    out.reward = row.get("raw_reward", row.get("rewards", source.reward))
    out.train_metadata = row.get("metadata", source.train_metadata)
    same = length == source.response_length and (out.tokens is source.tokens or out.tokens == source.tokens)
    out.weight_versions = source.weight_versions if same else []
    for name in ("rollout_log_probs", "rollout_routed_experts"):
        setattr(out, name, row[name] if name in row else getattr(source, name) if same else None)
    if "rollout_log_probs" not in row and any(map(operator.gt, out.loss_mask, source.loss_mask or out.loss_mask)):
        out.rollout_log_probs = None  # some trained tokens were not sampled by an engine
    if "truncated" in row:
        out.truncated = bool(row["truncated"])
    return out, same


def _number(hook: Hook, name: str, i: int, value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise _wrong(hook, name, f"[{i}] is {said(value, 40)}, no finite number", "return one number for each row")
    return number


def _wrong(hook: Hook, field: str, what: str, remedy: str) -> RolloutError:
    """Make the error of a field. `what` begins with the place in the field, or with "it"."""
    text = f"{field}{what}" if what.startswith("[") else f"{field}: {what}"
    return RolloutError(text, where=hook.place(f"field {field}"), remedy=remedy)

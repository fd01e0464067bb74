"""The function of `--rollout-data-postprocess-path`: it changes the data of a rank before its optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from instep.arguments.args import Args
from instep.system.hooks import Hook
from instep.system.hooks.user_code import said
from instep.types import TokenBatch

_LENGTHS = ("total_lengths", "response_lengths")
_INTERNAL = ("fresh", "older", "loss_weights", "loss_scale")
_EXPECTED = "by its changes in rollout_data lists with one entry per sample, such as a tensor [response_length]"


def postprocessed(args: Args, rollout_id: int, batch: TokenBatch) -> TokenBatch:
    """Return the samples of this data-parallel rank after the user's function; unchanged without one.

    f(args, rollout_id, rollout_data) changes `rollout_data`, a dict of lists with one entry per sample under slime's
    names: `tokens` `[total_length]`, `total_lengths`, `response_lengths`; `loss_masks`, `log_probs`, `advantages` and
    every other token column as tensors `[response_length]`; `rewards`, `raw_reward`, `sample_indices`, the users' own
    columns. It is called on every rank of the actor, and must do the same on all ranks with the same samples. A mask
    may become smaller: the denominators of the loss stay those of the original rollout, as in slime.

    Raises:
        RolloutError: it raised, changed tokens or lengths, added tokens to a mask, or changed the lengths of columns.
    """
    if args.rollout_data_postprocess_path is None:
        return batch
    hook = Hook("--rollout-data-postprocess-path", args.rollout_data_postprocess_path)
    where, data = f"rollout {rollout_id}", _rollout_data(batch)
    tokens, lengths = torch.cat(data["tokens"]).clone(), [list(data[name]) for name in _LENGTHS]
    given = data.keys() | set()
    hook.call(args.view({}), rollout_id, data, where=where)
    if gone := given - data.keys():
        raise hook.wrong(sorted(gone), "rollout_data with all of its columns, changed or not", f"{where}: gone")
    with hook.reading(data.get("tokens"), "unchanged tokens and lengths", where):
        same = torch.equal(torch.cat(data["tokens"]), tokens) and [list(data[name]) for name in _LENGTHS] == lengths
        if not same:
            raise ValueError("they have changed")
    token_columns, sample_columns = dict(batch.token_columns), dict(batch.sample_columns)
    for name in sorted(data.keys() - {"tokens", "raw_reward", "sample_indices", *_LENGTHS, *_INTERNAL}):
        values, own = data[name], "loss_mask" if name == "loss_masks" else name
        with hook.reading(values, _EXPECTED, f"rollout_data[{said(name, 60)}]"):
            if len(values) != batch.num_samples:
                raise ValueError("the number of samples has changed")
            if own in token_columns or _are_rows(values, lengths[1]):
                rows = [torch.as_tensor(v).detach().flatten() for v in values]
                if [len(row) for row in rows] != lengths[1]:
                    raise ValueError("the lengths have changed")
                token_columns[own] = torch.cat(rows).float().cpu()
            elif isinstance(known := sample_columns.get(own), Tensor):
                sample_columns[own] = torch.as_tensor(values, dtype=known.dtype)
            else:
                sample_columns[own] = list(values)
    mask, before = token_columns["loss_mask"], batch.token_columns["loss_mask"]
    if bool(((mask > 0) & (before <= 0)).any()):
        raise hook.wrong(data["loss_masks"], "masks that only remove trained tokens", where)
    share = torch.where(before > 0, mask / before.clamp(min=1e-9), torch.zeros_like(mask))
    token_columns["loss_weights"] = batch.token_columns["loss_weights"] * share
    return replace(batch, token_columns=token_columns, sample_columns=sample_columns)


def _rollout_data(batch: TokenBatch) -> dict[str, Any]:
    """Return copies of the columns, under slime's names."""
    total, lengths = batch.total_lengths.tolist(), batch.response_lengths.tolist()
    own = {name: column for name, column in batch.sample_columns.items() if name not in _INTERNAL}
    data: dict[str, Any] = {n: c.tolist() if isinstance(c, Tensor) else list(c) for n, c in own.items()}
    columns = {n: c.clone() for n, c in batch.token_columns.items() if n not in _INTERNAL}
    columns["loss_masks"] = columns.pop("loss_mask")
    data |= {name: list(column.split(lengths)) for name, column in columns.items()}
    data |= {"raw_reward": list(data.get("rewards", ())), "sample_indices": list(data.get("index", ()))}
    tokens = list(batch.tokens.clone().split(total))
    return data | {"tokens": tokens, "total_lengths": total, "response_lengths": lengths}


def _are_rows(values: Any, lengths: list[int]) -> bool:
    """Return whether there is a tensor `[response_length]` for each sample."""
    return all(isinstance(v, Tensor) and v.shape == (n,) for v, n in zip(values, lengths, strict=True))

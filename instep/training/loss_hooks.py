"""Users' functions inside a loss, with slime's signatures: importance correction, reducer, whole losses.

A hook gets a micro-batch as lists of one tensor per sample, without `loss_weights`. Its reduced results are multiplied
by `loss_scale`: 1 / (executions of the step), or 1 / (its tokens) with `--calculate-per-token-loss`, as in slime.
`instep.training.slime_api` has the functions that such hooks import from slime's trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.algorithms.losses.policy import Correct, Correction, Reduce
from instep.arguments.args import Args
from instep.arguments.settings import HookSettings
from instep.system.hooks import Hook
from instep.training.backend import LossFn, LossOutput, TokenOutputs
from instep.types import TokenBatch

_INTERNAL = ("fresh", "older")  # columns that no hook gets: a user's field may have this name
_OWN = frozenset({"loss", "pg_loss", "loss_weight", "log_prob", "pg_clipfrac", "ppo_kl", "entropy", "kl_loss"})


@dataclass(frozen=True)
class LossHooks:
    """The functions of `--custom-tis-function-path` and `--custom-pg-loss-reducer-function-path`.

    Attributes:
        args: the arguments in the form that the functions get.
        tis, reducer: their dotted paths; None for the built-in formula.
    """

    args: HookSettings | None = None
    tis: str | None = None
    reducer: str | None = None

    @classmethod
    def from_args(cls, args: Args) -> LossHooks:
        return cls(args.view({}), args.custom_tis_function_path, args.custom_pg_loss_reducer_function_path)

    def correction(self, batch: TokenBatch) -> Correct | None:
        """Return the importance correction of `--custom-tis-function-path`. Its signature:

        f(args=, pg_loss=, train_log_probs=, rollout_log_probs=, loss_masks=, total_lengths=, response_lengths=)
        -> (pg_loss, masks, metrics): pg_loss `[num_tokens]`, one mask per sample, metrics `[num_tokens]` each.
        """
        if self.tis is None:
            return None
        hook, lengths = Hook("--custom-tis-function-path", self.tis), batch.response_lengths.tolist()

        def correct(loss: Tensor, train: Tensor, engine: Tensor, mask: Tensor) -> Correction:
            out = hook.call(
                args=self.args,
                pg_loss=loss,
                train_log_probs=list(train.split(lengths)),
                rollout_log_probs=list(engine.split(lengths)),
                loss_masks=list(mask.split(lengths)),
                total_lengths=batch.total_lengths.tolist(),
                response_lengths=lengths,
            )
            expected = f"(pg_loss, masks, metrics): {loss.numel()} tokens each, masks per sample"
            if not isinstance(out, tuple) or len(out) != 3 or not isinstance(out[2], dict):
                raise hook.wrong(out, expected)
            masks = out[1] if isinstance(out[1], list | tuple) else [out[1]]
            if not all(isinstance(x, Tensor) for x in (out[0], *masks, *out[2].values())):
                raise hook.wrong(out, expected)
            keep = torch.cat([m.flatten() for m in masks]).to(loss.dtype)
            metrics = {str(name): out[2][name] for name in sorted(out[2])}
            if any(x.shape != loss.shape for x in (out[0], keep, *metrics.values())) or _OWN & set(metrics):
                shapes = {n: tuple(x.shape) for n, x in {"pg_loss": out[0], "masks": keep, **metrics}.items()}
                raise hook.wrong(shapes, expected + ", own metric names", "shapes")
            return Correction(out[0], keep, metrics)

        return correct

    def reduction(self, batch: TokenBatch) -> Reduce | None:
        """Return the reduction of `--custom-pg-loss-reducer-function-path`. Its signature:

        f(total_lengths, response_lengths, masks, per_token) -> function from `[num_tokens]` to a scalar.
        """
        if self.reducer is None or self.args is None:
            return None
        hook, lengths = Hook("--custom-pg-loss-reducer-function-path", self.reducer), batch.response_lengths.tolist()
        per_token = self.args.calculate_per_token_loss

        def reduce(loss: Tensor, mask: Tensor) -> Tensor:
            reducer = hook.call(batch.total_lengths.tolist(), lengths, list(mask.split(lengths)), per_token)
            if not callable(reducer):
                raise hook.wrong(reducer, "a function that reduces the losses of tokens")
            with hook.guard("the function that it returned"):
                reduced = reducer(loss)
            return _scalar(hook, reduced) * _scale(batch)

        return reduce


def custom_loss_fn(args: Args) -> LossFn:
    """Return the loss of `--custom-loss-function-path`: f(args, batch, logits, reducer) -> (loss, metrics).

    batch: a dict of lists, one entry per sample: `unconcat_tokens`, `total_lengths`, `response_lengths`, `loss_masks`
    and every token column (`advantages`, `log_probs`, `ref_log_probs`, `rollout_log_probs`, ...); `tokens` is the
    packed `[1, num_tokens]`, sample columns (`rewards`, `metadata`, ...) keep their names. logits: float32 `[1,
    num_tokens, vocab_size]` before the temperature, with gradient. reducer: `[num_response_tokens]` -> the sum over
    executions of their token means (the sum over tokens with `--calculate-per-token-loss`). metrics: scalars, made by
    `reducer`, or summed over micro-batches in the same way.
    """
    hook, view = Hook("--custom-loss-function-path", str(args.custom_loss_function_path)), args.view({})

    def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
        scale, weights = _scale(batch), batch.token_columns["loss_weights"]

        def reducer(values: Tensor) -> Tensor:
            kept = torch.where(weights > 0, values, torch.zeros_like(values))
            return (weights * kept).sum() / scale

        assert outputs.logits is not None, "the worker requests logits for a custom loss"
        out = hook.call(view, hook_batch(batch), outputs.logits, reducer)
        if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], dict):
            raise hook.wrong(out, "(loss, metrics)")
        loss = _scalar(hook, out[0]) * scale
        with hook.reading(out[1], "metrics that are scalars, by name", "metrics"):
            metrics = {
                str(n): torch.as_tensor(v, device=loss.device).detach().float() * scale
                for n, v in sorted(out[1].items())
            }
        return LossOutput(loss, {**metrics, "loss": loss.detach(), "loss_weight": weights.sum()})

    return loss_fn


def hook_batch(batch: TokenBatch) -> dict[str, Any]:
    """Return a micro-batch in the form that a custom loss gets; see `custom_loss_fn`."""
    total, lengths = batch.total_lengths.tolist(), batch.response_lengths.tolist()
    columns: dict[str, Any] = {
        name: list(column.split(lengths)) for name, column in batch.token_columns.items() if name not in _INTERNAL
    }
    columns["loss_masks"] = columns["loss_mask"]
    tokens = {"tokens": batch.tokens[None], "unconcat_tokens": list(batch.tokens.split(total))}
    return {**batch.sample_columns, **columns, **tokens, "total_lengths": total, "response_lengths": lengths}


def _scale(batch: TokenBatch) -> float:
    """Return the `loss_scale` of the micro-batch's optimizer step."""
    return float(batch.sample_columns["loss_scale"][0])


def _scalar(hook: Hook, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise hook.wrong(tuple(value.shape) if isinstance(value, Tensor) else value, "a tensor with one number")
    return value.reshape(())

"""The learning rate of each optimizer step: the formulas of Megatron-Core's `OptimizerParamScheduler` (0.16.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from instep.arguments.settings import OptimizerSettings
from instep.errors import ConfigError


@dataclass(frozen=True)
class LRSchedule:
    """A linear warm-up from `init_lr` to `lr` over `warmup` steps, then `style` down to `min_lr` at step `decay`.

    WSD (warm-up, stable, decay; MiniCPM, arXiv:2404.06395) stays at `lr` until the last `wsd_decay` steps and decays
    there by `wsd_style`. Steps are optimizer steps; Megatron counts samples. This matters only for inverse-square-root
    without a warm-up.

    Raises:
        ConfigError: values that contradict each other.
    """

    lr: float
    min_lr: float = 0.0
    warmup: float = 0
    decay: float = 1
    style: str = "linear"
    init_lr: float = 0.0
    wsd_decay: float | None = None
    wsd_style: str = "exponential"

    def __post_init__(self) -> None:
        left = self.decay - self.warmup
        if self.style != "constant" and left <= 0:
            raise ConfigError(
                f"{self.warmup:g} warm-up steps, but the decay ends at step {self.decay:g}",
                where="learning-rate schedule",
                remedy="lower --lr-warmup-iters, raise --lr-decay-iters, or use --lr-decay-style constant",
            )
        if self.style == "WSD" and not 0 < (self.wsd_decay or 0) <= left:
            raise ConfigError(
                f"--lr-wsd-decay-iters {self.wsd_decay} of {left:g} steps after the warm-up",
                where="learning-rate schedule",
                remedy="give the number of steps of the final decay",
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step`, counted from 0."""
        if self.warmup > 0 and step <= self.warmup:
            return self.init_lr + (self.lr - self.init_lr) * step / self.warmup
        if self.style == "constant":
            return self.lr
        if step > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        return self.min_lr + self._coefficient(step) * (self.lr - self.min_lr)

    def _coefficient(self, step: int) -> float:
        """Return the fraction, from 1 down to 0, of the distance from `min_lr` to `lr`."""
        style, ratio = self.style, (step - self.warmup) / (self.decay - self.warmup)
        if style == "WSD":
            assert self.wsd_decay is not None
            start = self.decay - self.wsd_decay
            if step <= start:
                return 1.0
            style, ratio = self.wsd_style, (step - start) / self.wsd_decay
        if style == "linear":
            return 1 - ratio
        if style == "cosine":
            return (math.cos(math.pi * ratio) + 1) / 2
        if style == "exponential":
            return 2 * 0.5**ratio - 1
        return 1 - math.sqrt(ratio)  # minus_sqrt


def from_args(args: OptimizerSettings, total_steps: int) -> LRSchedule:
    """Return the schedule of `--lr*` and `--min-lr`, for a run of `total_steps` optimizer steps."""
    decay = args.lr_decay_iters or total_steps
    wsd: dict[str, Any] = {}
    if args.lr_decay_style == "WSD":
        wsd = {"wsd_decay": args.lr_wsd_decay_iters, "wsd_style": args.lr_wsd_decay_style}
    return LRSchedule(
        lr=args.lr,
        min_lr=args.min_lr or 0.0,
        warmup=args.lr_warmup_iters or 0 if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay,
        decay=decay,
        style=args.lr_decay_style,
        init_lr=args.lr_warmup_init,
        **wsd,
    )

"""The figures of a rollout that people are shown: which there are depends on what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A metric as people see it.

    Attributes:
        label: its name on the panel, in lines and tables.
        metric: its name in metrics.jsonl.
        digits: after the point, where the number is neither tiny nor huge.
        in_table: whether the table at the end has its last value, too.
    """

    label: str
    metric: str
    digits: int = 3
    in_table: bool = False

    @property
    def key(self) -> str:
        """Its name in summary.json, before `_first` and `_last`."""
        return self.label.replace(" ", "_")


_LOSS = Figure("loss", "train/loss", 4)
_GRAD_NORM = Figure("grad norm", "train/grad_norm")
_TOKENS = Figure("tokens", "rollout/num_tokens", 0)
_MASKED = Figure("masked", "rollout/masked_ratio", in_table=True)
_TRAIN_SPEED = Figure("train tok/s", "perf/train_tokens_per_second", 0)

# The first is the one that is to get better: the panel draws its course, the table at the end has its first and last.
_SAMPLED = (
    Figure("reward", "rollout/reward_mean"),
    _LOSS,
    Figure("entropy", "train/entropy"),
    _GRAD_NORM,
    Figure("length", "rollout/response_length_mean", 1),
    Figure("gap", "train/log_prob_gap_max"),
    Figure("rollout tok/s", "perf/rollout_tokens_per_second", 0),
    _TRAIN_SPEED,
)
_OF_LOSS = {
    "sft_loss": (_LOSS, _TOKENS, _MASKED, _GRAD_NORM, _TRAIN_SPEED),
    "dpo_loss": (
        _LOSS,
        Figure("accuracy", "train/reward_accuracy", in_table=True),
        Figure("margin", "train/reward_margin", in_table=True),
        _TOKENS,
        _GRAD_NORM,
        _TRAIN_SPEED,
    ),
}


def figures_of(args: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Return the figures of a run with these arguments: those of its loss, else those of a policy that samples."""
    return _OF_LOSS.get(str(args.get("loss_type")), _SAMPLED)

"""The figures of a rollout for people, by the kind of training; numbers and durations for people."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def duration(seconds: float | None) -> str:
    """Format seconds as `h:mm:ss` or `mm:ss`; "-" for None."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for people: 1,234 or 0.412 or 1.2e-06; "-" for None, "n/a" for NaN."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "n/a" if math.isnan(value) else str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.1e}"


@dataclass(frozen=True)
class Figure:
    """A metric as people see it.

    Attributes:
        label: its name on the panel, in lines and tables.
        metric: its name in metrics.jsonl.
        digits: after the point, unless the number is tiny or huge.
        in_table: whether the final table shows its last value, too.
        noise: smaller values are shown as 0.
    """

    label: str
    metric: str
    digits: int = 3
    in_table: bool = False
    noise: float = 0.0

    def text(self, value: float | None) -> str:
        """Format its value for people."""
        return number(0.0 if value is not None and abs(value) < self.noise else value, self.digits)

    @property
    def key(self) -> str:
        """Its name in summary.json, before `_first` and `_last`."""
        return self.label.replace(" ", "_")


_TEXTS = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))
LEGEND: dict[str, str] = _TEXTS.pop("legend")
SUMMARY: dict[str, str] = _TEXTS.pop("summary")  # what the values of summary.json are
_BY_LOSS = {loss: tuple(Figure(**row) for row in rows) for loss, rows in _TEXTS.items()}


def figures_of(args: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Return the figures of a run with these arguments: by its loss, else those of a policy that samples."""
    return _BY_LOSS[_kind(args)]


def legend_of(args: Mapping[str, Any]) -> str:
    """Return a text about the figures of a run with these arguments."""
    return LEGEND[_kind(args)]


def _kind(args: Mapping[str, Any]) -> str:
    loss = str(args.get("loss_type"))
    return loss if loss in _BY_LOSS else "policy"

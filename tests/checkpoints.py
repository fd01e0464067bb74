"""Whole checkpoints for tests, written at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instep.checkpoints.folders import begin_checkpoint


def save_checkpoint(
    root: Path,
    iteration: int,
    write: Callable[[Path], Mapping[str, str]],
    state: dict[str, Any] | None,
    earlier: Callable[[Path], None] | None = None,
) -> Path:
    """Write one checkpoint and return its folder; `write` writes the files, and returns their known digests."""

    def begin(folder: Path) -> Callable[[], Mapping[str, str]]:
        known = write(folder)
        return lambda: known

    return begin_checkpoint(root, iteration, begin, state, earlier)()

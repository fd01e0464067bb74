"""How the ranks that write a checkpoint in the background tell that they have: by a file each, in its folder.

They can use neither their connection to the controller nor their process group meanwhile: training goes on with both.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError
from instep.system.atomic import write_text

LOOK_SECONDS = 0.05


def _note(folder: Path, rank: int) -> Path:
    return folder / f".written_{rank}.json"


def tell_written(folder: Path, rank: int, **news: Any) -> None:
    """Tell that `rank` has done what it writes into `folder`; with `error`, why it has not."""
    try:
        write_text(_note(folder, rank), json.dumps(news))
    except OSError:
        _note(folder, rank).touch()  # on a full disk a name still has room


def wait_written(
    folder: Path, ranks: Iterable[int], deadline: float, stop: threading.Event | None = None
) -> dict[int, dict[str, Any]]:
    """Wait until `ranks` have told; returns what each has, and removes nothing.

    Args:
        deadline: by the monotonic clock.
        stop: once it is set, nobody waits any longer.

    Raises:
        CheckpointError: a rank could not write its part, or has not told in time.
    """
    news: dict[int, dict[str, Any]] = {}
    waiting = list(ranks)
    while waiting:
        for rank in [r for r in waiting if _note(folder, r).exists()]:
            text = _note(folder, rank).read_text(encoding="utf-8") or '{"error": "not even an error; see its log"}'
            news[rank] = json.loads(text)
            if why := news[rank].get("error"):
                raise CheckpointError(f"rank {rank} has written: {why}", where=str(folder), remedy="free space")
            waiting.remove(rank)
        if not waiting:
            break
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            late = "the run has ended" if stop is not None and stop.is_set() else "it takes longer than --train-timeout"
            raise CheckpointError(
                f"ranks {waiting} have not written their files: {late}",
                where=str(folder),
                remedy="look for a slow or full disk, or raise --train-timeout",
            )
        time.sleep(LOOK_SECONDS)
    return news


def remove_notes(folder: Path) -> None:
    for note in folder.glob(".written_*.json"):
        note.unlink()

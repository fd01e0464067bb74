"""How ranks that write a checkpoint in the background report that they are done: with one file each, in its folder.

Meanwhile training uses their connection to the controller and their process group, so they cannot use either.
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
    """Report that `rank` has written its part into `folder`; with `error`, why it has not."""
    try:
        write_text(_note(folder, rank), json.dumps(news))
    except OSError:
        _note(folder, rank).touch()  # a full disk still has room for a name


def wait_written(
    folder: Path, ranks: Iterable[int], deadline: float, stop: threading.Event | None = None
) -> dict[int, dict[str, Any]]:
    """Wait until all `ranks` have reported. Return what each has reported; no file is removed.

    Args:
        deadline: by the monotonic clock.
        stop: ends the wait when it is set.

    Raises:
        CheckpointError: a rank could not write its part, or has not reported in time.
    """
    news: dict[int, dict[str, Any]] = {}
    waiting = list(ranks)
    while waiting:
        for rank in [r for r in waiting if _note(folder, r).exists()]:
            text = _note(folder, rank).read_text(encoding="utf-8") or '{"error": "not even an error; see its log"}'
            news[rank] = json.loads(text)
            if why := news[rank].get("error"):
                raise CheckpointError(f"rank {rank} reports: {why}", where=str(folder), remedy="free space")
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

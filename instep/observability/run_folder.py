"""The folder of a run: which run it belongs to, and which of its files the run wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from instep.arguments.paths import RUN_FILES
from instep.system.atomic import free_name

LOGS = "logs"
# The logs of a run. Their folder may also have the user's own logs (`> RUN_DIR/logs/out.txt`).
_OUR_LOGS = re.compile(
    r"((actor|critic)-rank\d+|engine-\d+(-node\d+)?|(router|gate)(-.*)?|env(-eval)?-\d+)\.log|"
    r"trackio\.log|(dump-\d+|error|stdout|stderr)\.txt"
)


def config_of(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a run; None if `folder` is not the folder of a run."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) and config.keys() >= {"args", "versions"} else None


def move_run_aside(folder: Path) -> Path | None:
    """Move the files of an earlier run in `folder` to `folder/old-<n>`, config.json last; None if there is no run."""
    if config_of(folder) is None:
        return None
    place = free_name(folder, "old")
    place.mkdir()
    for name in RUN_FILES:
        logs = [path for path in folder.glob(f"{LOGS}/*") if _OUR_LOGS.fullmatch(path.name)]
        for path in logs if name == LOGS else folder.glob(name):
            target = place / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
    with contextlib.suppress(OSError):  # it has logs of the user
        (folder / LOGS).rmdir()
    return place

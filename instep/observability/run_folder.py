"""The folder of a run: whose it is, and which files in it are the run's own."""

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
# What a run writes into its folder of logs, which may hold a user's own ones, too (`> RUN_DIR/logs/out.txt`).
_OUR_LOGS = re.compile(
    r"((actor|critic)-rank\d+|engine-\d+(-node\d+)?|(router|gate)(-.*)?|env(-eval)?-\d+)\.log|"
    r"(dump-\d+|error|stdout|stderr)\.txt"
)


def config_of(folder: Path) -> dict[str, Any] | None:
    """Return what config.json of a run says; None where `folder` is not a run's."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) and config.keys() >= {"args", "versions"} else None


def move_run_aside(folder: Path) -> Path | None:
    """Move the files of the run that was in `folder` to `folder/old-<n>`, config.json last; None if there was none."""
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
    with contextlib.suppress(OSError):  # it holds logs of the user's
        (folder / LOGS).rmdir()
    return place

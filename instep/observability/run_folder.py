"""The folder of a run: which run it belongs to, and which of its files the run wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from instep.arguments.paths import RUN_FILES
from instep.observability.figures import duration
from instep.system.atomic import free_name
from instep.system.endings import end_of_log

LOGS = "logs"
TAIL, TAIL_BYTES = 12, 64 << 10  # of an error or log: its last lines, within its last bytes
# The logs of a run. Their folder may also have the user's own logs (`> RUN_DIR/logs/out.txt`).
_OUR_LOGS = re.compile(
    r"((actor|critic)-rank\d+|engine-\d+(-node\d+)?|(router|gate)(-.*)?|env(-eval)?-\d+)\.log|"
    r"trackio\.log|(dump-\d+|error|notes|stdout|stderr)\.txt"
)


def config_of(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a run; None if `folder` is not the folder of a run."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) and config.keys() >= {"args", "versions"} else None


@dataclass(frozen=True)
class State:
    """How a run is: `name` is running, elsewhere (on another host), failed, killed, or the status of its summary."""

    name: str
    text: str
    remedy: str = ""


def state_of(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> State:
    """Return the state of a run; of one that failed with its last lines."""
    process = config.get("process") or {}
    pid, host = process.get("pid"), process.get("host")
    if summary is not None:
        status = str(summary.get("status", "finished"))
        return State(
            status, f"{status} after {duration(summary.get('wall_seconds'))}", str(summary.get("to_go_on") or "")
        )
    if host != socket.gethostname():
        text = f"not finished; pid {pid} on host {host}, not visible from here"
        return State("elsewhere", text, f"run `instep doctor` on {host}")
    if (age := _age(pid, process.get("started"))) is not None:
        stacks = f"kill -USR1 {pid} writes its stacks into {folder / 'logs'}/dump-<n>.txt"
        return State("running", f"running as pid {pid} for {duration(age)}\n{stacks}")
    error = folder / "logs" / "error.txt"
    if error.exists():
        lines = error.read_text(errors="replace").split("\n\n")[0].splitlines()
        return State("failed", "ended by an error\n" + "\n".join(lines[-TAIL:]), f"see {error} for more")
    logs = sorted((folder / LOGS).glob("*.log"), key=lambda p: p.stat().st_mtime)
    tail = end_of_log(logs[-1], TAIL_BYTES)[-TAIL:] if logs else []
    said = f"\nthe last lines of {logs[-1]}:\n" + "\n".join(tail) if tail else ""
    save = config["args"].get("save")
    goes_on = f"--load {save} continues after its last checkpoint" if save else "nothing was saved (no --save)"
    remedy = f"it was killed (SIGKILL), by a user or for lack of memory (see `dmesg`); {goes_on}"
    return State("killed", f"pid {pid} has ended without a summary or an error{said}", remedy)


def _age(pid: int | None, started: float | None) -> float | None:
    """Return the seconds since a process began; None if it has ended, or if the pid is another's now."""
    if pid is None or started is None:
        return None
    try:
        began = psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return time.time() - began if abs(began - started) < 2 else None


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

"""The sinks of metrics: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.errors import ConfigError, OutputError, reading, writing
from instep.system.atomic import replacing, sync_folder, write_text
from instep.system.private import without_secrets


def jsonable(value: Any) -> Any:
    """Convert `value` to plain JSON types: numbers that are not finite become null, other objects their `str`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: after a crash the file has either the old or the new content."""
    with writing(path):
        write_text(path, json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n", flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_json`; {} without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, an empty list without a file; see `json_lines`."""
    return [row for _, row in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield line and row of a JSON-lines file, one at a time. Skip an incomplete last line, which a kill cut.

    Raises:
        OutputError: another line is not a JSON object, or the file cannot be read.
    """
    if not path.exists():
        return
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # it was not written completely
                return
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise _damaged(path, number, str(error)) from None
            if not isinstance(row, dict):
                raise _damaged(path, number, "it is not a JSON object")
            yield line, row


def _damaged(path: Path, number: int, why: str) -> OutputError:
    remedy = "correct or remove that line; or move the file away, and continue without the rows before the checkpoint"
    return OutputError(f"line {number} of {path.name} is damaged: {why:.200}", where=str(path), remedy=remedy)


class JsonLines:
    """Append rows to a JSON-lines file, flush each, and notice when the file is no longer there.

    It continues an earlier session's file. First it removes (atomically) the rows for which `keep(row)` is false.
    No row stays in memory. Without `keep` it reads no row, and cuts off an incomplete last line alone.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None):
        self._path = path
        with writing(path):
            if keep is None:
                _cut_last_line(path)
            else:
                with replacing(path) as part, part.open("wb") as out:
                    out.writelines(line for line, row in json_lines(path) if keep(row))
                    out.flush()
                    os.fsync(out.fileno())
            sync_folder(path.parent)
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")
            self._file.flush()
        self.check()

    def check(self) -> None:
        """Raise OutputError if the file is no longer at its path."""
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:  # the path cannot be checked now; a write raises if that matters
            return
        if not there:
            raise OutputError(
                f"{self._path.name} was moved, removed or replaced while the run wrote it",
                where=str(self._path),
                remedy="leave the folder of a run as it is until the run has ended; restart, with --load if a "
                "checkpoint is still there",
            )

    def sync(self) -> None:
        """Write the rows to the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # rows that could not be written were reported by `write`
            self._file.close()


def _cut_last_line(path: Path) -> None:
    """Cut a file after its last newline."""
    with path.open("a+b") as file:
        if os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            file.truncate(end)


class TensorBoard:
    """Write TensorBoard scalars with tensorboard's own writer (which needs no torch).

    On a resume TensorBoard drops the events of an earlier session from `resume_from_step` on.
    """

    def __init__(self, folder: Path, resume_from_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._folder = Event, folder
        with writing(folder):
            self._writer = EventFileWriter(str(folder))
        if resume_from_step is not None:
            self._writer.add_event(Event(step=resume_from_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with writing(self._folder):
            self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=Summary(value=values)))
            self._writer.flush()

    def close(self, failed: bool = False) -> None:
        with contextlib.suppress(OSError):  # `log` has reported what could not be written
            self._writer.close()


class WandB:
    """Log to Weights & Biases. The API key comes only from the environment (WANDB_API_KEY) or `wandb login`.

    Args:
        options: `project`, `group`, `team` (entity), `mode` (online, offline, disabled; default online), `run_id` (of
            the run to continue), `dir` (default: the run's folder).

    Raises:
        ConfigError: wandb is not installed, or the run cannot be opened.
    """

    def __init__(self, run_dir: Path, options: Mapping[str, Any], config: Mapping[str, Any], name: str):
        try:
            import wandb
        except ImportError:
            what = "wandb is not installed"
            raise ConfigError(what, where="--use-wandb", remedy="`instep install wandb`, or remove the flag") from None
        folder = Path(options.get("dir") or run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # console="off": wandb must not wrap stdout, which the progress panel uses. Every wait has a limit.
        settings = wandb.Settings(console="off", silent=True, init_timeout=90, finish_timeout=300, reinit="create_new")
        try:
            self._run = wandb.init(
                project=options.get("project"),
                group=options.get("group"),
                entity=options.get("team"),
                mode=options.get("mode"),
                id=options.get("run_id"),
                resume="allow" if options.get("run_id") else None,
                dir=str(folder),
                name=name,
                config=jsonable(without_secrets(config)),
                settings=settings,
            )
        except (wandb.Error, ValueError) as error:
            raise ConfigError(
                f"W&B did not open a run: {error}",
                where="--use-wandb",
                remedy="set WANDB_API_KEY, or use --wandb-mode offline",
            ) from error
        self.run_id = str(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))

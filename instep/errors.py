"""The errors that users can meet; each says what happened, where, and what to do about it.

The command line prints `str(error)`; tracebacks go to the log only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.system.private import without_credentials


class InstepError(Exception):
    """Base of all named errors.

    Args:
        what: what happened, with the offending value.
        where: the file, line, flag, field, engine or rank it happened at.
        remedy: what the user can do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = map(without_credentials, (what, where, remedy))
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [f"{type(self).__name__}: {self.what}"]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(cls: type[InstepError], what: str, where: str, remedy: str) -> InstepError:
    return cls(what, where=where, remedy=remedy)


class ConfigError(InstepError):
    """A flag, a combination of flags or a configuration file is wrong. Raised before anything heavy loads."""

    exit_code = 2


class DataError(InstepError):
    """A data file or one of its rows is unusable."""

    exit_code = 2


class CheckpointError(InstepError):
    """A checkpoint cannot be read or written."""


class EngineError(InstepError):
    """An inference engine died, refused a request or did not answer in time."""


class NoAnswerError(EngineError):
    """An engine did not answer, or answered with server errors: it may be about to end."""


class SyncError(InstepError):
    """An engine does not hold the trainer's weights, or could not be shown to."""


class WorkerError(InstepError):
    """A training worker died, raised or did not answer in time."""


class RewardError(InstepError):
    """A reward function raised, hung or returned something that is no finite number."""


class TrainingError(InstepError):
    """Weights or gradients are not finite any more."""


class OutputError(InstepError):
    """A file of the run (metrics, samples, reports) cannot be written."""


class RolloutError(InstepError):
    """A rollout function or a hook returned something that cannot be trained on."""


@contextmanager
def writing(path: Path, flag: str = "") -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `path`, or the flag that it came from."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}",
            where=flag or str(path),
            remedy="free space, fix permissions or name another folder; --load goes on from a checkpoint, if any",
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `path`."""
    try:
        yield
    except OSError as error:
        remedy = "mend its permissions or its disk, or move it away"
        raise OutputError(
            f"{path} cannot be read: {error.strerror or error}", where=str(path), remedy=remedy
        ) from error

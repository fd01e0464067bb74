"""The errors for users. Each says what happened, where, and what to do.

The command line prints `str(error)`. Tracebacks go only to the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from instep.system.private import without_credentials


class InstepError(Exception):
    """Base of all named errors.

    Args:
        what: what happened, with the wrong value.
        where: the file, line, flag, field, engine or rank.
        remedy: what the user can do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = map(without_credentials, (what, where, remedy))
        super().__init__(self.what)

    def __str__(self) -> str:
        rest = ("  where:  ", self.where), ("  remedy: ", self.remedy)
        return "\n".join([f"{type(self).__name__}: {self.what}", *(name + text for name, text in rest if text)])

    def __reduce__(self):
        return partial(type(self), where=self.where, remedy=self.remedy), (self.what,)


class ConfigError(InstepError):
    """A flag, a combination of flags or a configuration file is wrong. It is raised before anything heavy is loaded."""

    exit_code = 2


class DataError(InstepError):
    """A data file or one of its rows is unusable."""

    exit_code = 2


class CheckpointError(InstepError):
    """A checkpoint cannot be read or written."""


class EngineError(InstepError):
    """An inference engine died, refused a request or did not answer in time."""


class NoAnswerError(EngineError):
    """An engine did not answer, or answered with server errors. It may be about to end."""


class SyncError(InstepError):
    """An engine does not have the trainer's weights, or this could not be proven."""


class WorkerError(InstepError):
    """A training worker died, raised or did not answer in time."""


class RewardError(InstepError):
    """A reward function raised, hung or returned something that is not a finite number."""


class TrainingError(InstepError):
    """Weights or gradients are no longer finite."""


class OutputError(InstepError):
    """A file of the run (metrics, samples, reports) cannot be written."""


class RolloutError(InstepError):
    """A rollout function or a hook returned something that cannot be trained on."""


@contextmanager
def writing(path: Path, flag: str = "") -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `path` or its flag."""
    remedy = "free space, fix permissions or name another folder; --load continues from a checkpoint, if any"
    with _named(f"{path} cannot be written", flag or str(path), remedy):
        yield


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `path`."""
    with _named(f"{path} cannot be read", str(path), "correct its permissions or its disk, or move it away"):
        yield


@contextmanager
def _named(what: str, where: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what}: {error.strerror or error}", where=where, remedy=remedy) from error

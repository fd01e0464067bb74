"""The end of a save: while the run waits, or with --async-save in a thread while it goes on.

    train      | # steps  | . | # steps                | # steps  |
    workers    |          | # | # write their copies   |          |
    controller | # state  | # | # wait for them        | # files.json, its name, latest_checkpointed_iteration.txt

At most one save is in flight: the next one waits for it, and so does a run that ends, also by an error or by Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.controller.deployment import Deployment
from instep.controller.run_state import Beginning
from instep.controller.trainer import Trainer
from instep.errors import CheckpointError, InstepError
from instep.system.scratch import export_folder

if TYPE_CHECKING:
    from instep.arguments.args import Args

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
CLOSE_SECONDS = 60.0  # for removing what was not completed


class Saves:
    """What `--save`, `--critic-save` and `--save-hf` ask for in one run.

    Args:
        beginning: the checkpoint that the run began with.

    Attributes:
        exported: the folder of the last export of this session, as `model`.
    """

    def __init__(self, args: Args, beginning: Beginning, deployment: Deployment, tell: Callable[[str], None]):
        self._args, self._beginning, self._deployment, self._tell = args, beginning, deployment, tell
        self.exported: dict[str, str] = {}
        self._any = False  # in this session
        self._in_flight = ""  # what is written
        self._written = threading.Event()  # join() of a thread takes it for dead after a Ctrl-C (CPython before 3.13)
        self._written.set()
        self._error: InstepError | None = None
        self._is_whole, self._given_up = True, ""  # the last one; why the run waits no longer for it
        self._seconds: float | None = None  # of the last that has ended
        self._closed = threading.Event()

    def write(self, trainer: Trainer, rollout_id: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save after `rollout_id`; with --async-save the checkpoint is in flight when this returns, the export is not.

        Args:
            state: the controller's; called only if it is saved.
        """
        args = self._args
        ends = self._begin(trainer, rollout_id, state)
        if args.async_save:
            self._in_flight = f"the checkpoint of iteration {rollout_id}"
            self._is_whole = False
            self._written.clear()
            threading.Thread(target=self._run, args=(ends, time.monotonic()), name="checkpoint", daemon=True).start()
        else:
            ends()
        if args.save_hf:
            trainer.actor.export_hf(folder := export_folder(args.save_hf, rollout_id))
            self.exported = {"model": os.path.abspath(folder)}
        self._any = True

    def _begin(self, trainer: Trainer, rollout_id: int, state: Callable[[], dict[str, Any]]) -> Callable[[], object]:
        """Begin the checkpoints; returns a function that ends them."""
        args, closed = self._args, self._closed
        if args.critic_save:
            root, earlier = Path(args.critic_save), None if self._beginning.state else self._earlier(args.critic_save)
            if not args.save:
                return trainer.begin_critic(root, rollout_id, earlier, closed)
        if not args.save:
            return lambda: None
        whole = trainer.begin_save(Path(args.save), rollout_id, state(), self._earlier(args.save), closed)
        return (lambda: trainer.link_critic(root, rollout_id, whole(), earlier)) if args.critic_save else whole

    def _earlier(self, root: str) -> Callable[[Path], None] | None:
        """What to call when the checkpoints that an earlier run has left in `root` were moved; None if none are."""
        begins = self._beginning.checkpoint if self._beginning.state is not None else None
        goes_on = begins is not None and begins.parent.resolve() == Path(root).resolve()
        if self._any or goes_on:
            return None
        return lambda place: self._tell(f"{root} held checkpoints that this run did not --load: see {place}")

    # ---- in the background -------------------------------------------------------------------------------------------

    def _run(self, end: Callable[[], object], began: float) -> None:
        try:
            end()
            self._is_whole = True
            self._seconds = time.monotonic() - began
        except InstepError as error:
            self._error = error
        except Exception as error:  # the border of this thread: `check` raises it
            logger.exception("%s", self._in_flight)
            self._error = CheckpointError(
                f"{self._in_flight} was not written: {type(error).__name__}: {error}",
                where="--async-save",
                remedy="the checkpoints before it are whole; report it with the traceback above",
            )
        self._written.set()

    def check(self) -> None:
        """Raise the error of a save that has failed."""
        if (error := self._error) is not None:
            self._error = None
            raise error

    def wait(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            CheckpointError: it has failed, or takes too long. WorkerError: a worker has died.
        """
        timeout = self._args.train_timeout
        deadline = time.monotonic() + timeout
        while not self._written.wait(LOOK_SECONDS):
            for group in self._deployment.worker_groups:
                group.check_alive()
            if time.monotonic() > deadline:
                self._closed.set()
                raise CheckpointError(
                    f"{self._in_flight} is not on the disk after {timeout:.0f} s",
                    where="--async-save",
                    remedy="look for a slow disk, save less often (--save-interval), or raise --train-timeout",
                )
        self.check()

    def last(self) -> None:
        """Wait in a run that ends, also by an error or Ctrl-C; `close` says of a save that it has lost."""
        try:
            if not self._written.is_set():
                self._tell(f"waiting until {self._in_flight} is on the disk; another Ctrl-C gives it up")
            self.wait()
        except InstepError as error:
            self._given_up = error.what
        except KeyboardInterrupt:
            self._given_up = "interrupted"

    def close(self) -> None:
        """End what is still in flight, after the workers have ended; a save that is lost gets a line."""
        self._closed.set()
        self._written.wait(CLOSE_SECONDS)
        if self._given_up and not self._is_whole:
            self._tell(f"the checkpoint that was being written is lost: {self._given_up}")

    def metrics(self) -> dict[str, float]:
        """The seconds of a save that has ended since the last call."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"perf/save_write_seconds": seconds}

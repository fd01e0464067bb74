"""The end of a save: the run waits for it, or with --async-save a thread ends it while the run continues.

    train      | # steps  | . | # steps                | # steps  |
    workers    |          | # | # write their copies   |          |
    controller | # state  | # | # wait for them        | # files.json, its name, latest_checkpointed_iteration.txt

At most one save is in flight. The next save waits for it, and so does the end of a run, also by an error or Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from instep.arguments.args import Args
from instep.controller.deployment import Deployment
from instep.controller.run_state import Beginning
from instep.controller.trainer import Trainer
from instep.errors import CheckpointError, InstepError
from instep.system.processes import in_thread
from instep.system.scratch import export_folder

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
CLOSE_SECONDS = 60.0  # to remove an incomplete save


class Saves:
    """The saves of one run: `--save`, `--critic-save` and `--save-hf`.

    Args:
        beginning: the checkpoint that the run begins with.

    Attributes:
        exported: the folder of the last export of this session, as `model`.
    """

    def __init__(self, args: Args, beginning: Beginning, deployment: Deployment, tell: Callable[[str], None]):
        self._args, self._beginning, self._deployment, self._tell = args, beginning, deployment, tell
        self.exported: dict[str, str] = {}
        self._any = False  # in this session
        self._in_flight: Future[float] | None = None  # gives the seconds of a background save
        self._what, self._given_up = "", ""  # what is saved; why the run no longer waits for it
        self._seconds: float | None = None  # of the last finished save
        self._closed = threading.Event()

    def write(self, trainer: Trainer, rollout_id: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save after `rollout_id`. With --async-save the checkpoint is still in flight on return; the export is done.

        Args:
            state: returns the controller's state; called only if it is saved.
        """
        args = self._args
        end, began = self._begin(trainer, rollout_id, state), time.monotonic()

        def end_timed() -> float:
            end()
            return time.monotonic() - began

        if args.async_save:
            self._what = f"the checkpoint of iteration {rollout_id}"
            self._in_flight = in_thread(end_timed, "checkpoint")
        else:
            end()
        if args.save_hf:
            trainer.actor.export_hf(folder := export_folder(args.save_hf, rollout_id))
            self.exported = {"model": os.path.abspath(folder)}
        self._any = True

    def _begin(self, trainer: Trainer, rollout_id: int, state: Callable[[], dict[str, Any]]) -> Callable[[], object]:
        """Begin the checkpoints; return a function that ends them."""
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
        """Return the call for moved checkpoints of an earlier run in `root`; None if there is nothing to move."""
        begins = self._beginning.checkpoint if self._beginning.state is not None else None
        goes_on = begins is not None and begins.parent.resolve() == Path(root).resolve()
        if self._any or goes_on:
            return None
        return lambda place: self._tell(f"{root} held checkpoints that this run did not --load: see {place}")

    # ---- in the background -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error of a failed save, once."""
        if self._in_flight is None or not self._in_flight.done():
            return
        outcome, self._in_flight = self._in_flight, None
        error = outcome.exception()
        if error is None or isinstance(error, InstepError):
            self._seconds = outcome.result()
            return
        logger.error("%s", self._what, exc_info=error)
        raise CheckpointError(
            f"{self._what} was not written: {type(error).__name__}: {error}",
            where="--async-save",
            remedy="the checkpoints before it are whole; report it with the traceback above",
        )

    def wait(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            CheckpointError: it failed, or takes too long. WorkerError: a worker died.
        """
        timeout = self._args.train_timeout
        deadline = time.monotonic() + timeout
        while self._in_flight is not None and not wait([self._in_flight], LOOK_SECONDS).done:
            for group in self._deployment.worker_groups:
                group.check_alive()
            if time.monotonic() > deadline:
                self._closed.set()
                raise CheckpointError(
                    f"{self._what} is not on the disk after {timeout:.0f} s",
                    where="--async-save",
                    remedy="look for a slow disk, save less often (--save-interval), or raise --train-timeout",
                )
        self.check()

    def last(self) -> None:
        """Wait at the end of a run, also after an error or Ctrl-C; `close` reports a lost save."""
        try:
            if self._in_flight is not None and not self._in_flight.done():
                self._tell(f"waiting until {self._what} is on the disk; press Ctrl-C again to give it up")
            self.wait()
        except InstepError as error:
            self._given_up = error.what
        except KeyboardInterrupt:
            self._given_up = "interrupted"

    def close(self) -> None:
        """End a save in flight after the workers have ended; report a lost save in a line."""
        self._closed.set()
        is_whole = False
        if (outcome := self._in_flight) is not None:
            is_whole = bool(wait([outcome], CLOSE_SECONDS).done) and outcome.exception() is None
        if self._given_up and not is_whole:
            self._tell(f"the checkpoint that was being written is lost: {self._given_up}")

    def metrics(self) -> dict[str, float]:
        """Return the seconds of a save that ended since the last call."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"perf/save_write_seconds": seconds}

"""Rollouts that are generated while the workers train: one round ahead, or group by group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from instep.controller.round import Rollout
from instep.rollout import runtime
from instep.rollout.outputs import as_train_output
from instep.rollout.stream import Stream, num_tokens
from instep.system.processes import LOOK_SECONDS, in_thread
from instep.types import RolloutFnTrainOutput

if TYPE_CHECKING:
    from instep.controller.controller import Controller


class RoundsAhead:
    """Generate the next round in a separate thread while one round is trained, with any rollout function.

    If a checkpoint restored all groups of a round as finished in the ledger, that round is ready at once.
    Args:
        num_rounds: 1; or 0: a round begins when it is taken, as in `instep train`.
    """

    def __init__(self, controller: Controller, num_rounds: int):
        self._controller, self._num_rounds = controller, num_rounds
        self._next: Future[Rollout] | None = None  # the round that is taken next
        first = controller.start_rollout_id
        if (groups := controller.ledger.finished) and first < controller.num_rollout:
            self._next = Future()
            output = RolloutFnTrainOutput(groups, {"rollout/num_tokens_generated": float(sum(map(num_tokens, groups)))})
            self._next.set_result(controller.rollout_of(first, output, 0, {}))

    def take(self, rollout_id: int) -> Rollout:
        """Wait for the rollout of a round, and start the next one.

        Raises:
            InstepError: the rollout function failed, or a process died.
        """
        if self._next is None:
            self._begin(rollout_id)
        rollout = self._result()
        self._next = None
        if self._num_rounds and rollout_id + 1 < self._controller.num_rollout:
            self._begin(rollout_id + 1)
        metrics = {f"async/{name}_seconds": seconds for name, seconds in rollout.seconds.items()}
        return replace(rollout, metrics=rollout.metrics | metrics, seconds={})  # the step counts its waiting time

    def sync(self, rollout_id: int) -> None:
        """Sync when no response is in progress; `rollout_id` is the round that was trained last."""
        if self._next is not None:
            self._result()
        self._controller.sync_weights()

    def _begin(self, rollout_id: int) -> None:
        self._next = in_thread(partial(self._controller.generate, rollout_id), f"rollout {rollout_id} ahead")

    def _result(self) -> Rollout:
        assert self._next is not None
        with self._controller.log.phase("wait"):
            while not wait([self._next], LOOK_SECONDS).done:
                self._controller.deployment.check_and_rejoin()
            return self._next.result()


class GroupsAhead:
    """Generate groups all the time, as many as later rounds may use within `--max-staleness`.

    A sync may come while responses are generated: `--pause-mode` decides what happens to them. In deterministic mode
    they end before the sync.

    Args:
        syncs_after: whether a sync follows a round.
    """

    def __init__(self, controller: Controller, syncs_after: Callable[[int], bool]):
        self._controller, self._syncs_after = controller, syncs_after
        self._args, self._num_dropped = controller.args, controller.ledger.num_dropped
        self._bound = int(controller.args.max_staleness or 0)
        first, data, version = controller.start_rollout_id, controller.data_source, controller.deployment.version
        self._stream = Stream(controller.hook_args, data, first, version, controller.ledger.finished)
        self._open(first)

    def take(self, rollout_id: int) -> Rollout:
        """Wait for the groups of a round; new groups may begin in their place.

        Raises:
            InstepError: a group failed, or a process died.
        """
        controller, bound = self._controller, self._bound
        engines, trainer = controller.deployment.version, controller.deployment.trained_version

        def places(version: int) -> int:
            return self._places(rollout_id, bound - (engines - version))

        def take() -> RolloutFnTrainOutput:
            taken = self._stream.take(rollout_id, trainer - bound, places)
            return runtime.run(taken, timeout=self._args.rollout_timeout)

        with controller.log.phase("wait", rollout_id):
            output = as_train_output(controller.call(take, f"rollout {rollout_id}"))
        before, self._num_dropped = self._num_dropped, controller.ledger.num_dropped
        return controller.rollout_of(rollout_id, output, self._num_dropped - before, {})

    def sync(self, rollout_id: int) -> None:
        """Sync while responses are generated; `rollout_id` is the round that was trained last."""
        if self._args.deterministic_mode:
            with self._controller.log.phase("wait"):
                self._controller.call(lambda: runtime.run(self._stream.settled()), "the groups in progress")
        self._controller.sync_weights()
        self._open(rollout_id + 1)

    def _open(self, rollout_id: int) -> None:
        """Let groups begin with the weights of the last sync; `rollout_id` is the next round."""
        left = rollout_id < self._controller.num_rollout
        room = self._args.rollout_batch_size + self._places(rollout_id, self._bound) if left else 0
        runtime.run(self._stream.open(self._controller.deployment.version, room))

    def _places(self, rollout_id: int, age: int) -> int:
        """Return the number of groups that later rounds take, if trained weights are at most `age` versions newer.

        Round r + 1 trains weights that are one version newer than the engines' weights when round r is taken.
        """
        num_rounds = 0
        while age > 0 and rollout_id + 1 < self._controller.num_rollout:
            num_rounds += 1
            age -= self._syncs_after(rollout_id)
            rollout_id += 1
        return num_rounds * self._args.rollout_batch_size


def rollouts_ahead(controller: Controller, syncs_after: Callable[[int], bool]) -> RoundsAhead | GroupsAhead:
    """Return the rollouts for `--max-staleness`: without it one round ahead, with 0 none, else group by group."""
    args, left = controller.args, controller.start_rollout_id < controller.num_rollout
    if args.max_staleness and args.load_debug_rollout_data is None and left:
        return GroupsAhead(controller, syncs_after)
    return RoundsAhead(controller, 1 if args.max_staleness is None else 0)

"""The schedule of an asynchronous run: engines generate while workers train. Time runs to the right; a dot waits.

                | take n          | train n         | sync                        | finish_step, save, evaluate
    engines     | # n             | # n + 1         | # n + 1, load, probe        | # responses
    workers     | .               | # score, steps  | . then send, probe          | # files
    controller  | # rewards       | # rewards       | # rewards, proof            | # metrics, state
                  -> Rollout        -> TrainedRollout  -> a version

Workers wait in `take` for groups that are not ready. With one rollout ahead, they also wait before a sync for the
current rollout; with `--max-staleness` groups are generated all the time. docs/async.md describes all waits, and how
old a token may become.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from instep.algorithms.catalog import algorithm_of
from instep.controller.ahead import rollouts_ahead
from instep.controller.controller import Controller
from instep.controller.round import Step
from instep.train_sync import evaluates_after, evaluates_at, save_and_evaluate, saves_after, to_the_end

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.arguments.settings import Settings


def train(args: Args) -> dict[str, Any]:
    """Run `instep train-async`, and return the summary, which is also written to `summary.json`."""
    return to_the_end(steps(args))


def steps(args: Args) -> Generator[Step, None, dict[str, Any]]:
    """Run the loop as in `instep/train_sync.py`. The engines go on while the caller has a step."""
    with Controller(args, title=algorithm_of(args).title, with_engines=not args.debug_train_only) as controller:
        controller.sync_weights()
        if evaluates_at(args, controller.start_rollout_id, controller.num_rollout):
            controller.evaluate(controller.start_rollout_id)

        ahead = rollouts_ahead(controller, lambda n: syncs_after(args, n, controller.num_rollout))
        for rollout_id in range(controller.start_rollout_id, controller.num_rollout):
            with controller.profile.step(rollout_id):
                rollout = ahead.take(rollout_id)  # the next ones begin
                trained = controller.train(rollout)
                if syncs_after(args, rollout_id, controller.num_rollout):
                    ahead.sync(rollout_id)
                metrics = controller.finish_step(rollout, trained)
            yield Step(rollout_id, rollout.groups, metrics, save_and_evaluate(controller, rollout_id))

        return controller.finish()


def syncs_after(args: Settings, rollout_id: int, num_rollout: int) -> bool:
    """Return whether to sync after a rollout.

    A sync is due every `--update-weights-interval` rollouts. Another one comes before a checkpoint, so that its weights
    have a version, and before an evaluation, so that it uses the newest weights.
    """
    due = (rollout_id + 1) % args.update_weights_interval == 0
    return due or saves_after(args, rollout_id, num_rollout) or evaluates_after(args, rollout_id, num_rollout)

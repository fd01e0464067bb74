"""The schedule of a synchronous run: one step after the other. Time runs to the right; a dot waits.

                | generate        | train            | sync            | finish_step, save | evaluate
    engines     | # responses     | .                | # load, probe   | .                 | # responses
    workers     | # begin early   | # score, steps   | # send, probe   | # files           | .
    controller  | # rewards       | # advantages     | # proof         | # metrics, state  | # rewards
                  -> Rollout        -> TrainedRollout  -> a version

The workers train on the whole rollout, which was generated with their current weights. They may begin early with
finished groups (`controller/early.py`, `early_step.py`). The engines wait for the training and the sync, so no token is
older than the last step. While a checkpoint is written, nothing else runs; with --async-save the workers copy their
state to host memory, and threads write it during the next steps. SFT and DPO train on responses from the data: they
have no engines, so no sync and no evaluation.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from instep.algorithms.catalog import algorithm_of
from instep.controller.controller import Controller
from instep.controller.round import Step

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.arguments.settings import EvalSettings, Settings


def train(args: Args) -> dict[str, Any]:
    """Run `instep train`, `sft` or `dpo`, and return the summary, which is also written to `summary.json`."""
    return to_the_end(steps(args))


def to_the_end(loop: Generator[Step, None, dict[str, Any]]) -> dict[str, Any]:
    """Run a loop, and return its summary."""
    try:
        while True:
            next(loop)
    except StopIteration as end:
        return dict(end.value)
    finally:
        loop.close()


def steps(args: Args) -> Generator[Step, None, dict[str, Any]]:
    """Run the loop: yield each finished step, and return the summary. Closing the generator ends the run."""
    algorithm = algorithm_of(args)
    with_engines = algorithm.has_rewards and not args.debug_train_only
    with Controller(args, title=algorithm.title, with_engines=with_engines) as controller:
        controller.sync_weights()  # --hf-checkpoint may be stale: the engine never answers from it
        if evaluates_at(args, controller.start_rollout_id, controller.num_rollout):
            controller.evaluate(controller.start_rollout_id)

        for rollout_id in range(controller.start_rollout_id, controller.num_rollout):
            with controller.profile.step(rollout_id):
                rollout = controller.generate(rollout_id)
                trained = controller.train(rollout)
                controller.sync_weights()
                metrics = controller.finish_step(rollout, trained)  # before the save, so its steps are on disk
            yield Step(rollout_id, rollout.groups, metrics, save_and_evaluate(controller, rollout_id))

        return controller.finish()


def save_and_evaluate(controller: Controller, rollout_id: int) -> dict[str, float]:
    """Save and evaluate after a rollout if due. Return `eval/*`."""
    args, num_rollout = controller.args, controller.num_rollout
    if saves_after(args, rollout_id, num_rollout):
        controller.save(rollout_id)
    return controller.evaluate(rollout_id + 1) if evaluates_after(args, rollout_id, num_rollout) else {}


def evaluates_at(args: EvalSettings, rollout_id: int, num_rollout: int) -> bool:
    """Return whether to evaluate before the first rollout of a session.

    This is due at the start, after a resume where the interval is due, and always if no rollout is left
    (`--num-rollout 0`, a finished run).
    """
    if not args.eval_interval or (rollout_id == 0 < num_rollout and args.skip_eval_before_train):
        return False
    return rollout_id % args.eval_interval == 0 or rollout_id >= num_rollout


def evaluates_after(args: EvalSettings, rollout_id: int, num_rollout: int) -> bool:
    """Return whether to evaluate after a rollout: every `--eval-interval` rollouts, and after the last."""
    if not args.eval_interval:
        return False
    return (rollout_id + 1) % args.eval_interval == 0 or rollout_id + 1 == num_rollout


def saves_after(args: Settings, rollout_id: int, num_rollout: int) -> bool:
    """Return whether to save after a rollout: every `--save-interval` rollouts, and after the last."""
    if not (args.save or args.save_hf or args.critic_save):
        return False
    interval = args.save_interval or num_rollout
    return (rollout_id + 1) % interval == 0 or rollout_id + 1 == num_rollout

"""The schedule of training on responses from the data (SFT, DPO): `instep/train_sync.py` without engines."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from instep.algorithms.catalog import algorithm_of
from instep.controller.controller import Controller
from instep.controller.round import Step
from instep.train_sync import saves_after, to_the_end

if TYPE_CHECKING:
    from instep.arguments.args import Args


def sft(args: Args) -> dict[str, Any]:
    """Run `instep sft` or `instep dpo`; returns the summary that is also written to `summary.json`."""
    return to_the_end(steps(args))


def steps(args: Args) -> Generator[Step, None, dict[str, Any]]:
    """The loop, as that of `instep/train_sync.py`; evaluations there are none."""
    with Controller(args, title=algorithm_of(args).title, with_engines=False) as controller:
        for rollout_id in range(controller.start_rollout_id, controller.num_rollout):
            with controller.profile.step(rollout_id):
                rollout = controller.generate(rollout_id)
                trained = controller.train(rollout)
                metrics = controller.finish_step(rollout, trained)
            if saves_after(args, rollout_id, controller.num_rollout):
                controller.save(rollout_id)
            yield Step(rollout_id, rollout.groups, metrics, {})
        return controller.finish()

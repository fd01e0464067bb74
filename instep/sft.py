"""The schedule of training on responses from the data (SFT, DPO): `instep/train_sync.py` without engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.algorithms.catalog import algorithm_of
from instep.controller.controller import Controller
from instep.train_sync import saves_after

if TYPE_CHECKING:
    from instep.arguments.args import Args


def sft(args: Args) -> dict[str, Any]:
    """Run `instep sft` or `instep dpo`; returns the summary that is also written to `summary.json`."""
    with Controller(args, title=algorithm_of(args).title, with_engines=False) as controller:
        for rollout_id in range(controller.start_rollout_id, controller.num_rollout):
            with controller.profile.step(rollout_id):
                rollout = controller.generate(rollout_id)
                trained = controller.train(rollout)
                controller.finish_step(rollout, trained)
            if saves_after(args, rollout_id, controller.num_rollout):
                controller.save(rollout_id)
        return controller.finish()

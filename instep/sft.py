"""Training on responses that the data holds (SFT, DPO): the loop of `instep/train.py` without engines."""

from __future__ import annotations

from typing import Any

from instep.algorithms.catalog import algorithm_of
from instep.controller.controller import Controller
from instep.train import saves_after


def sft(args: Any) -> dict[str, Any]:
    """Run `instep sft` or `instep dpo`; returns the summary that is also written to `summary.json`."""
    with Controller(args, title=algorithm_of(args).title, with_engines=False) as controller:
        for rollout_id in range(controller.start_rollout_id, controller.num_rollout):
            rollout = controller.generate(rollout_id)
            trained = controller.train(rollout)
            controller.finish_step(rollout, trained)
            if saves_after(args, rollout_id, controller.num_rollout):
                controller.save(rollout_id)
        return controller.finish()

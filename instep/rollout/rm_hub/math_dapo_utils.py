"""slime's `compute_score` of DAPO's task, under its name."""

from __future__ import annotations

from typing import Any

from instep.rollout.rewards.dapo import dapo
from instep.rollout.rewards.text import last_boxed

BOX_CHARS = 100  # only the end of a response is searched for a box


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """Return `score` (+1 or -1), `acc` and `pred` of a response, by its last `Answer:` line (--rm-type dapo).

    Args:
        strict_box_verify: grade the last `\\boxed{...}` of the last 100 characters, which must equal the label exactly;
            `pred` is None without a box.
    """
    if not strict_box_verify:
        return dapo(solution_str, ground_truth)
    pred = last_boxed(solution_str[-BOX_CHARS:])
    right = pred is not None and pred == str(ground_truth).strip()
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}

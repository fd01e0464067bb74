"""SFT's rollout function with time between its batches, in which a save in the background ends."""

from __future__ import annotations

import time
from typing import Any

from instep.rollout.sft_rollout import generate_rollout

SECONDS = 3.0


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    time.sleep(SECONDS)
    return generate_rollout(args, rollout_id, data_source, evaluation)

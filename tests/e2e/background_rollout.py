"""A rollout function beside whose rollouts long responses are under way, also while the weights change."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from instep.rollout import runtime
from instep.rollout.execute import new_execution, run_group
from instep.rollout.request_gate import gate
from instep.rollout.vllm_rollout import generate_rollout
from instep.types import Sample

NUM_LONG, LENGTH, SECONDS = 3, 600, 120.0  # new ones at the end of each rollout: they meet the next sync
_tasks: list[asyncio.Task[list[Sample]]] = []
_under_way: list[int] = []


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    _under_way.append(gate().num_under_way)  # what the sync before has left
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    if rollout_id < args.num_rollout - 1:
        runtime.run(_begin(args, rollout_id))
        return output
    samples = runtime.run(_end(), timeout=SECONDS)
    rows = [[s.tokens, s.rollout_log_probs, [(v.version, v.start, v.end) for v in s.weight_versions]] for s in samples]
    Path(args.run_dir, "background.json").write_text(json.dumps({"rows": rows, "under_way": _under_way}))
    return output


async def _begin(args: Any, rollout_id: int) -> None:
    execution = new_execution(args, 0)
    for i in range(NUM_LONG):
        group = 1000 + NUM_LONG * rollout_id + i
        sample = Sample(group_index=group, index=group, prompt=f"{i} and ", reward=0.0)
        params = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "seed": group}
        _tasks.append(asyncio.create_task(run_group(execution, [sample], params)))
    await asyncio.sleep(0.05)


async def _end() -> list[Sample]:
    return [sample for samples in await asyncio.gather(*_tasks) for sample in samples]


async def reward(args: Any, sample: Sample) -> float:
    """One that varies, so that the weights change."""
    return float(sum(sample.tokens) % 2)

"""A generate function of three turns, with a tool's answer and a user's words between them, and its requests."""

from __future__ import annotations

import contextvars
import json
import os
from typing import Any

from instep.rollout import vllm_rollout
from instep.rollout.tokens import next_turn
from instep.types import Sample, Status
from tests.real.templates import TEXTS

TURN = 6  # tokens
_asking: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("_asking", default=None)
_ask = vllm_rollout.ask


async def _recorded(args: Any, sample: Sample, params: dict[str, Any]) -> Any:
    (answer,) = await _ask(args, sample, params)
    if (record := _asking.get()) is not None:
        record.append({"prompt": list(sample.tokens), "answer": answer.token_ids})
    return [answer]


vllm_rollout.ask = _recorded


def following(row: int) -> list[list[dict[str, Any]]]:
    """What is said after the first turn and after the second."""
    tool, user = (TEXTS[(row + n) % len(TEXTS)] for n in (3, 5))
    return [[{"role": "tool", "content": tool, "tool_call_id": "abcde1234"}], [{"role": "user", "content": user}]]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    record: list[dict[str, Any]] = []
    _asking.set(record)
    samples = [sample]
    for messages in [*following(sample.metadata["row"]), None]:
        last = samples[-1]
        turn = {**sampling_params, "max_new_tokens": last.response_length + TURN}
        await vllm_rollout.generate(args, last, turn)
        assert last.status is not Status.ABORTED
        if messages is not None and (after := next_turn(args, last, messages)) is not last:
            samples.append(after)
    with open(os.environ["TOOL_RECORD"], "a") as file:
        known = [{"tokens": s.tokens, "mask": s.loss_mask, "response": s.response} for s in samples]
        file.write(json.dumps({"row": sample.metadata["row"], "samples": known, "requests": record}) + "\n")
    return samples


def reward(args: Any, sample: Sample) -> float:
    return sum(sample.tokens) % 997 / 997  # no two alike

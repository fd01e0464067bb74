"""A generate function whose samples of even index have a sibling, another response to the same prompt."""

from __future__ import annotations

from typing import Any

from instep.rollout.vllm_rollout import generate as generate_one
from instep.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    first = await generate_one(args, sample, dict(sampling_params))
    if first.index is None or first.index % 2:
        return first
    second = Sample(prompt=first.prompt, tokens=first.tokens[: first.prompt_length], begun_version=first.begun_version)
    return [first, await generate_one(args, second, {**sampling_params, "seed": sampling_params["seed"] + 1000})]

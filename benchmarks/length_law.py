"""The heavy-tailed task of `async.py`: how long a response is, its generate function and its reward.

A response of prompt p has exactly `length(p, i)` tokens for its i-th sample: the values of a log-normal law (median 48,
sigma 1), cut at 8 and 512. So are the responses of models that reason: half of them are short, and the longest one of a
batch decides when it is done. The reward is the share of the tokens that are in the lower half of the vocabulary.
"""

from __future__ import annotations

import math
import random
from typing import Any

from instep.rollout.vllm_rollout import generate as generate_response
from instep.types import Sample

MEDIAN, SIGMA, SHORTEST, LONGEST = 48, 1.0, 8, 512
VOCABULARY = 512


def length(prompt: str, number: int) -> int:
    """Tokens of the response; the same in each run, and for each order of the prompts."""
    value = random.Random(f"{prompt} {number}").lognormvariate(math.log(MEDIAN), SIGMA)
    return round(min(max(value, SHORTEST), LONGEST))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """For --custom-generate-function-path."""
    limit = length(str(sample.prompt), (sample.index or 0) % args.n_samples_per_prompt)
    return await generate_response(args, sample, {**sampling_params, "max_new_tokens": limit, "ignore_eos": True})


async def reward(args: Any, sample: Sample) -> float:
    """For --custom-rm-path."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < VOCABULARY // 2 for token in response) / len(response)

"""The heavy-tailed task of `async.py`: how long a response is, its generate function and its reward.

A response of prompt p has exactly `length(p, i)` tokens for its i-th sample: the values of a log-normal law (median 48,
sigma 1), cut at 8 and 512. So are the responses of models that reason: half of them are short, and the longest one of a
batch decides when it is done. The reward is the share of the tokens that are in the lower half of the vocabulary. When
each response began and ended is written into `responses.jsonl` of the run's folder.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from instep.rollout.vllm_rollout import generate as generate_response
from instep.types import Sample, Status

MEDIAN, SIGMA, SHORTEST, LONGEST = 48, 1.0, 8, 512
VOCABULARY = 512  # of the model on a CPU
MAX_CONTINUATIONS = 100


def length(prompt: str, number: int) -> int:
    """Tokens of the response; the same in each run, and for each order of the prompts."""
    value = random.Random(f"{prompt} {number}").lognormvariate(math.log(MEDIAN), SIGMA)
    return round(min(max(value, SHORTEST), LONGEST))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """For --custom-generate-function-path."""
    limit, began = length(str(sample.prompt), (sample.index or 0) % args.n_samples_per_prompt), time.time()
    params = {**sampling_params, "max_new_tokens": limit, "ignore_eos": True}
    for _ in range(MAX_CONTINUATIONS):
        sample = await generate_response(args, sample, params)
        if sample.status is not Status.ABORTED:
            break
        await asyncio.sleep(0.02)  # a sync has ended the request: the response goes on
    with (Path(args.run_dir) / "responses.jsonl").open("a") as file:
        about = {"group": sample.group_index, "index": sample.index, "length": limit}
        file.write(json.dumps({**about, "began": began, "ended": time.time()}) + "\n")
    return sample


async def reward(args: Any, sample: Sample) -> float:
    """For --custom-rm-path."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    half = vocabulary(str(args.hf_checkpoint)) // 2
    return sum(token < half for token in response) / len(response)


def whole_rollouts(args: Any, samples: list[Any], data_source: Any) -> None:
    """For --rollout-all-samples-process-path, which lets nothing be trained before a rollout has ended."""


@functools.cache
def vocabulary(checkpoint: str) -> int:
    return int(json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"])

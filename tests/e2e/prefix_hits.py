"""Responses that meet syncs, and what vLLM's engines found in their caches of prefixes, by hooks."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

from instep.engines.http import open_directly
from instep.rollout.vllm_rollout import generate as generate_response
from instep.types import Sample, Status

FLAGS = ["--custom-rollout-log-function-path", "tests.e2e.prefix_hits.log"]
# Few samples of many tokens, so that a step takes less time than a response.
FLAGS += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
FLAGS += ["--rollout-max-response-len", "700", "--custom-generate-function-path", "tests.e2e.prefix_hits.generate"]
_FILE = "prefix-hits.json"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Groups have lengths of their own, so that they end one after the other, and some are under way at each sync."""
    length = random.Random(sample.group_index).randrange(400, sampling_params["max_new_tokens"])
    params = {**sampling_params, "max_new_tokens": length, "ignore_eos": True}
    while (sample := await generate_response(args, sample, params)).status is Status.ABORTED:
        await asyncio.sleep(0.02)
    return sample


def log(rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], rollout_time: float) -> bool:
    found = []
    for url in args.rollout_engine_urls:
        with open_directly(url + "/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        found.append(sum(map(float, re.findall(r"(?m)^vllm:prefix_cache_hits_total(?:{.*})? (\S+)$", metrics))))
    Path(args.run_dir, _FILE).write_text(json.dumps(found))
    return False


def of(run_dir: Path) -> list[float]:
    """The tokens that each engine found, until the last rollout."""
    found: list[float] = json.loads((run_dir / _FILE).read_text())
    return found

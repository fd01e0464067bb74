"""Hooks of runs with several models."""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from instep.rollout.http import api_key, post
from instep.rollout.vllm_rollout import get_model_url
from tests.e2e import observed
from tests.e2e.engine_killer import healthy, process_at

KILL_AT = 20  # calls
WAIT_SECONDS = 120.0
_num_calls = 0


async def reward(args: Any, sample: Any) -> float:
    """Both models answer by name, the actor where rollouts ask, and each as itself."""
    assert sorted(args.vllm_model_routers) == ["actor", "ref"]
    assert args.vllm_model_routers["actor"] == (args.vllm_router_ip, args.vllm_router_port)
    request = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    first, second = [(await post(get_model_url(args, name), request))["prompt_logprobs"] for name in ("actor", "ref")]
    assert abs(first[2]["7"]["logprob"] - second[2]["7"]["logprob"]) > 1e-3
    versions = [
        await asyncio.to_thread(_weight_version, url) for urls in args.vllm_model_engine_urls.values() for url in urls
    ]
    assert versions[0].isdigit() and versions[1] == "default"
    return await observed.reward(args, sample)


def _weight_version(url: str) -> str:
    return str(json.loads(_read(url + "/weight_info"))["weight_version"])


async def reward_that_looks_at_transfers(args: Any, sample: Any) -> float:
    """How many caches the engine that decodes has got, so far."""
    text = "\n".join([await asyncio.to_thread(_read, url + "/metrics") for url in args.rollout_engine_urls])
    found = re.findall(
        r"^(?:vllm:nixl_xfer_time_seconds|sglang:kv_transfer_latency_ms)_count(?:{.*})? (\S+)$", text, re.M
    )
    with open(Path(args.run_dir, "transfers.jsonl"), "a") as file:
        file.write(json.dumps({"transfers": sum(map(float, found))}) + "\n")
    return await observed.reward(args, sample)


def _read(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key(url)}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


async def reward_that_kills_a_reference(args: Any, sample: Any) -> float:
    """The last engine is killed at one call, and at the next it must serve again."""
    global _num_calls
    _num_calls += 1
    url = args.vllm_model_engine_urls["ref"][-1]
    if _num_calls == KILL_AT:
        victim = process_at(url)
        victim.kill()
        for _ in range(int(10 * WAIT_SECONDS)):
            if not psutil.pid_exists(victim.pid) and await asyncio.to_thread(healthy, url):
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(f"{url} did not come back")
    return await observed.reward(args, sample)


async def reward_that_kills_the_reference(args: Any, sample: Any) -> float:
    """At the last call of a rollout: it is the trainer that asks next."""
    global _num_calls
    _num_calls += 1
    if _num_calls == int(os.environ["KILL_AT"]):
        process_at(args.vllm_model_engine_urls["ref"][-1]).kill()
        Path(os.environ["KILLED"]).touch()
    return await observed.reward(args, sample)

"""How many tokens the KV caches of an engine hold, as vLLM's metrics tell."""

from __future__ import annotations

import http.client
import math
import re

from instep.engines.http import open_directly


def num_cached_tokens(url: str, timeout: float) -> float:
    """Ask the vLLM at `url`; infinity if it does not say it within `timeout` seconds."""
    try:
        with open_directly(url + "/metrics", timeout=timeout) as answer:
            return tokens_of_caches(answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return math.inf


def tokens_of_caches(metrics: str) -> float:
    """How many tokens the caches of all replicas hold, by vLLM's metrics; infinity where they do not say it."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")]
    caches = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    own = [cache.get("kv_cache_size_tokens", "") for cache in caches]  # of one replica, whatever kinds of layers it has
    if own and all(tokens.isdigit() for tokens in own):
        return float(sum(map(int, own))) or math.inf
    sizes = [(cache.get("num_gpu_blocks", ""), cache.get("block_size", "")) for cache in caches]
    if not sizes or not all(blocks.isdigit() and size.isdigit() for blocks, size in sizes):
        return math.inf  # of --disable-log-stats, or of another version
    return float(max(int(blocks) * int(size) for blocks, size in sizes))  # each line counts the blocks of all

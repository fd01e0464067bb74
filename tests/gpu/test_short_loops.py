"""The short loops of vLLM 0.26's scheduler against vLLM's own, with caches of several groups of layers.

A stand-in for the model draws each token by its request and place. No GPU is used, but only their hosts have vLLM 0.26.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig

pytest.importorskip("vllm")

from instep_engine.vllm.fast import KEY, is_known  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.skipif(not is_known(), reason="needs vLLM 0.26")]
BLOCK, END, CONTEXT = 16, 7, 1024
KINDS: list[list[int | None]] = [[None], [None, 17], [None, 40, 40], [40, 40, None, 40], [None, *[100] * 5]]


def scheduler(folder: Path, kind: type, windows: list[int | None], blocks: int, most: int, tokens: int) -> Any:
    """A scheduler for layers that see all tokens (None) or a window of them."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), max_model_len=CONTEXT, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=most, max_num_batched_tokens=tokens, max_model_len=CONTEXT, async_scheduling=True,
            enable_chunked_prefill=True, is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    shape: dict[str, Any] = dict(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    specs = [
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config.cache_config.num_gpu_blocks = blocks
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def simulate(made: Any, windows: list[int | None], seed: int) -> tuple[dict[str, list[Any]], int]:
    """The tokens, log-probs and ends of 40 requests, and the free blocks at the end. Checks what the worker sees."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    rng, hasher = random.Random(seed), get_request_block_hasher(BLOCK, sha256)
    common = [rng.randrange(1000) for _ in range(80)]
    waiting = []
    for i in range(40):
        if i % 4 == 0:  # a group has one prompt, and prompts begin alike
            prompt = common[: rng.randint(1, 80)] + [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
        waiting.append((rng.randint(0, 150), f"r{i}", prompt, rng.randint(1, 200)))
    tables: dict[str, list[list[int]]] = {}
    answers: dict[str, list[Any]] = {}
    underway: list[Any] = []
    step = 0
    while waiting or made.requests or any(scheduled.num_scheduled_tokens for scheduled in underway):
        step += 1
        assert step < 3000
        for _, name, prompt, length in [w for w in waiting if w[0] <= step]:
            params = SamplingParams(max_tokens=length, logprobs=0, stop_token_ids=[END], extra_args={KEY: 1})
            made.add_request(Request(name, list(prompt), params, None, arrival_time=step, block_hasher=hasher))
        waiting = [w for w in waiting if w[0] > step]
        scheduled = made.schedule()
        tables.update({new.req_id: [list(ids) for ids in new.block_ids] for new in scheduled.scheduled_new_reqs})
        cached = scheduled.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                tables[name] = [list(ids) for ids in added]
            for table, ids in zip(tables[name], added or (), strict=bool(added)):
                table += ids if name not in cached.resumed_req_ids else []
        for name, number in scheduled.num_scheduled_tokens.items():
            end = made.requests[name].num_computed_tokens
            managers = made.kv_cache_manager.coordinator.single_type_managers
            for window, manager, table in zip(windows, managers, tables[name], strict=True):
                first = max(0, end - number - (window or CONTEXT) + 1)
                own = [block.block_id for block in manager.req_to_blocks[name]]
                for place in range(first // BLOCK, -(-end // BLOCK)):  # that the step reads or writes
                    assert table[place] == own[place] != 0
        scheduled.unfinished = {n for n in scheduled.num_scheduled_tokens if made.requests[n].is_prefill_chunk}
        underway.append(scheduled)
        if len(underway) < 2 and scheduled.num_scheduled_tokens:
            continue
        done = underway.pop(0)
        names, tokens, places = list(done.num_scheduled_tokens), [], []
        for name in names:
            place = len(made.requests[name]._output_token_ids) if name in made.requests else 0
            places.append([float(place)])
            tokens.append([] if name in done.unfinished else [random.Random(f"{name}/{place}").randrange(100)])
        ids = np.array([row or [0] for row in tokens], np.int32).reshape(-1, 1)
        lists = LogprobsLists(ids, np.array(places, np.float32).reshape(-1, 1), np.zeros(len(names), np.int32))
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=lists if names else None, prompt_logprobs_dict={}, pooler_output=None,
        )  # fmt: skip
        for message in made.update_from_output(done, result).values():
            for output in message.outputs:
                answer = answers.setdefault(output.request_id, [[], [], None])
                answer[0] += output.new_token_ids
                answer[1] += output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
                answer[2] = (output.finish_reason, output.stop_reason)
    return answers, made.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("windows", KINDS, ids=str)
def test_the_results_are_those_of_vllm(
    windows: list[int | None], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache overflows."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from instep_engine.vllm.fast import decode
    from instep_engine.vllm.fast.hold_back import HoldBack

    config = Gemma3TextConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                              num_key_value_heads=1, head_dim=32, architectures=["Gemma3ForCausalLM"])  # fmt: skip
    config.save_pretrained(tmp_path)
    rng = random.Random(seed)
    sizes = rng.choice([60, 120, 400]) * len(windows), rng.choice([4, 16, 64]), rng.choice([64, 256, 2048])
    obstacles, schedule, num_short = decode.obstacles, decode.QuickScheduler._schedule, 0

    def counted(self: Any, decoding: Any) -> Any:
        nonlocal num_short
        num_short += 1
        return schedule(self, decoding)

    monkeypatch.setattr(decode.QuickScheduler, "_schedule", counted)
    monkeypatch.setattr(decode, "obstacles", lambda s: [o for o in obstacles(s) if o != "model runner V1"])  # a GPU's
    kinds = type("Plain", (HoldBack, AsyncScheduler), {}), decode.QuickScheduler
    plain, short = (simulate(scheduler(tmp_path, kind, windows, *sizes), windows, seed) for kind in kinds)
    assert plain == short and len(plain[0]) == 40
    assert num_short > 100

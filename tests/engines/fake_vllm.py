"""vLLM without a model: `python -m tests.engines.fake_vllm serve ... --worker-cls tests.engines.fake_vllm.Worker`.

Tokens and log-probs are functions of prompt and position, so that every answer can be checked, and the worker checks
what the scheduler tells it. On a CPU, too, vLLM schedules asynchronously here, for model runner V2.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

STEP_SECONDS = 0.002
if __name__ == "__main__":  # before vLLM is imported, and in no test that imports this
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def token_at(prompt: list[int], position: int) -> int:
    return 3 + (sum(prompt) * 17 + position * 131 + position * position) % 240


def log_prob_at(token: int, position: int) -> float:
    return -((token * 7 + position * 3) % 512) / 64


def response(prompt: list[int], num_tokens: int, stops: list[int] | None = None) -> tuple[list[int], list[float]]:
    """What a request gets that ends after `num_tokens`, or with one of `stops`."""
    tokens: list[int] = []
    while len(tokens) < num_tokens and not (tokens and tokens[-1] in (stops or ())):
        tokens.append(token_at(prompt, len(prompt) + len(tokens)))
    return tokens, [log_prob_at(token, len(prompt) + i) for i, token in enumerate(tokens)]


def pretend() -> None:
    """Let vLLM's CPU platform schedule as a GPU's does."""
    import vllm.config.vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    vllm.config.vllm.HAS_TRITON = True
    platform = type(current_platform)
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


@dataclass
class Row:
    """A request in the worker: its prompt, the tokens before it samples, those computed, and its number of blocks."""

    prompt: list[int]
    num_prefill: int
    num_computed: int
    num_blocks: int


def make_worker() -> type:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

    class Later(AsyncModelRunnerOutput):
        def __init__(self, output: Any, when: float):
            self.output, self.when = output, when

        def get_output(self) -> Any:
            time.sleep(max(0.0, self.when - time.monotonic()))
            return self.output

    class Worker(WorkerBase):
        def init_device(self) -> None:
            self.device, self.rows, self.step, self.done = torch.device("cpu"), {}, None, 0.0

        def load_model(self, **_: Any) -> None:
            pass

        def get_model(self) -> torch.nn.Module:
            return torch.nn.Identity()

        def determine_available_memory(self) -> int:
            return self.cache_config.kv_cache_memory_bytes

        def get_kv_cache_spec(self) -> dict[str, Any]:
            size = self.cache_config.block_size
            return {"layer": FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)}

        def get_supported_kv_cache_layouts(self) -> list[str]:
            return ["NHD"]

        def compile_or_warm_up_model(self) -> Any:
            return CompilationTimes(0.0, 0.0)

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def nothing(self, *_: Any, **__: Any) -> None:
            pass

        initialize_from_config = update_max_model_len = reset_encoder_cache = reset_mm_cache = nothing
        execute_dummy_batch = take_draft_token_ids = set_kv_cache_layout = synchronize_device = nothing

        def execute_model(self, step: Any) -> Any:
            for gone in step.finished_req_ids | (step.preempted_req_ids or set()):
                self.rows.pop(gone, None)
            for new in step.scheduled_new_reqs:
                before = new.prefill_token_ids or new.prompt_token_ids
                blocks = len(new.block_ids[0])
                self.rows[new.req_id] = Row(new.prompt_token_ids, len(before), new.num_computed_tokens, blocks)
            cached = step.scheduled_cached_reqs
            assert not cached.resumed_req_ids
            for name, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                row = self.rows[name]
                assert row.num_computed == computed, (name, row.num_computed, computed)
                row.num_blocks += len(blocks[0]) if blocks else 0
            for name, num_tokens in step.num_scheduled_tokens.items():
                row = self.rows[name]
                row.num_computed += num_tokens
                assert row.num_computed <= row.num_blocks * self.cache_config.block_size, name
            self.step = step
            return None if step.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

        def sample_tokens(self, _: Any) -> Any:
            names = sorted(self.step.num_scheduled_tokens)  # in an order of its own, as a model runner's
            tokens: list[list[int]] = []
            for name in names:
                row = self.rows[name]
                samples = row.num_computed >= row.num_prefill
                tokens.append([token_at(row.prompt, row.num_computed)] if samples else [])
            ids = [own[0] if own else 0 for own in tokens]
            values = [log_prob_at(i, self.rows[name].num_computed) for i, name in zip(ids, names, strict=True)]
            columns = np.array(ids, np.int32)[:, None], np.array(values, np.float32)[:, None]
            log_probs = LogprobsLists(*columns, np.ones(len(names), np.int32))
            rows = {name: i for i, name in enumerate(names)}
            self.done = max(time.monotonic(), self.done) + STEP_SECONDS
            output = ModelRunnerOutput(
                req_ids=names, req_id_to_index=rows, sampled_token_ids=tokens, logprobs=log_probs
            )
            return Later(output, self.done)

    return Worker


def __getattr__(name: str) -> Any:
    """`Worker`, made when vLLM asks for it: the tests import this file without vLLM."""
    if name == "Worker":
        globals()[name] = made = make_worker()
        return made
    raise AttributeError(name)


if __name__ in ("__main__", "__mp_main__"):  # also in vLLM's own child processes
    pretend()

if __name__ == "__main__":
    import sys

    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()

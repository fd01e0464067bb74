"""The short loops and the reused inputs of vLLM 0.26 in lockstep with vLLM's own code, without an engine."""

# mypy: ignore-errors
from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines import fake_vllm
from tests.engines.running import make_checkpoint

pytestmark = pytest.mark.vllm
NUM_SLOTS, BLOCK, MAX_LEN = 64, 16, 256


@pytest.fixture(autouse=True)
def needs_known() -> None:
    from instep_engine.vllm.fast import is_known

    if not is_known():
        pytest.skip("vLLM 0.26 only")


class Side:
    """A scheduler with a worker whose every token is known, and what has left it."""

    def __init__(self, cls: type, config: Any, kv: Any):
        from vllm.v1.structured_output import StructuredOutputManager

        structured = StructuredOutputManager(config)
        self.scheduler = cls(config, kv, structured_output_manager=structured, block_size=BLOCK, log_stats=True)
        self.worker = object.__new__(fake_vllm.Worker)
        self.worker.rows, self.worker.done, self.worker.cache_config = {}, 0.0, config.cache_config
        self.steps: deque[Any] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.log_probs: dict[str, list[float]] = {}

    def step(self) -> Any:
        step, result = self.scheduler.schedule(), None
        self.worker.execute_model(step)
        if step.total_num_scheduled_tokens:
            result = self.worker.sample_tokens(None).output
        self.steps.append((step, result))
        if len(self.steps) == 2:
            self.update()
        cached = step.scheduled_cached_reqs
        return (
            list(step.num_scheduled_tokens.items()),
            [(new.req_id, new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs],
            (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens),
            (step.finished_req_ids, step.preempted_req_ids, step.num_common_prefix_blocks),
        )

    def update(self) -> None:
        step, result = self.steps.popleft()
        if result is not None:
            for message in self.scheduler.update_from_output(step, result).values():
                self.take(message.outputs)

    def take(self, outputs: Any) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.new_logprobs is not None:
                self.log_probs.setdefault(output.request_id, []).extend(output.new_logprobs.logprobs[:, 0].tolist())


def configs(folder: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    import torch
    import vllm.config.vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    make_checkpoint(folder / "model", tied=True, max_len=MAX_LEN)
    args = EngineArgs(str(folder / "model"), max_num_seqs=NUM_SLOTS, max_model_len=MAX_LEN, block_size=BLOCK)
    config = args.create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    return config, KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def request(numbers: random.Random, i: int) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from instep_engine.vllm.fast import KEY

    init_none_hash(sha256)
    prompt = [numbers.randrange(3, 250) for _ in range(numbers.choice([5, 15, 16, 17, 40]))]
    num_tokens = numbers.choice([1, 2, 33, 100, 150, 500])
    stops = [fake_vllm.token_at(prompt, len(prompt) + num_tokens // 2)] if i % 3 == 0 else []
    params = SamplingParams(
        max_tokens=num_tokens, logprobs=0, ignore_eos=True, stop_token_ids=stops, extra_args={KEY: 1} if i % 9 else None
    )
    return Request(str(i), prompt, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


@pytest.mark.parametrize("num_blocks", [1000, 60])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_steps_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, seed: int) -> None:
    """With stops, aborts, forced resets, pauses, and preemption where blocks are few."""
    from vllm.v1.request import RequestStatus

    from instep_engine.vllm.fast.decode import QuickScheduler
    from instep_engine.vllm.fast.scheduler import FastAsyncScheduler

    config, kv = configs(tmp_path, num_blocks, monkeypatch)
    quick, stock = Side(QuickScheduler, config, kv), Side(FastAsyncScheduler, config, kv)
    assert not quick.scheduler._obstacles
    monkeypatch.setattr(QuickScheduler, "_admits", lambda self: bool(self.waiting or self.skipped_waiting))
    numbers, num_added, aborted = random.Random(seed), 0, set()
    for i in range(1500):
        event = numbers.random()
        if num_added < 60 and event < 0.1:
            kind = numbers.random()
            for side in (quick, stock):
                side.scheduler.add_request(request(random.Random(kind), num_added))
            num_added += 1
        for side in (quick, stock):
            if 0.1 < event < 0.105:
                side.scheduler.finish_requests(str(num_added - 1), RequestStatus.FINISHED_ABORTED)
                aborted.add(str(num_added - 1))
            elif 0.105 < event < 0.11:
                side.scheduler.reset_prefix_cache(reset_running_requests=True)
            elif 0.11 < event < 0.12:
                while side.steps:
                    side.update()
                side.take([output for _, output in side.scheduler.flush()])
        assert quick.step() == stock.step(), i
        for ours, theirs in zip(quick.scheduler.running, stock.scheduler.running, strict=True):
            assert ours.request_id == theirs.request_id
            assert ours.num_in_flight_tokens == theirs.num_in_flight_tokens
            assert ours.num_tokens == theirs.num_tokens
    assert num_added == 60 and not quick.scheduler.requests and not stock.scheduler.requests
    assert quick.tokens.keys() == stock.tokens.keys()
    for name, tokens in stock.tokens.items():
        if name not in aborted:  # their held-back tokens are dropped
            assert (quick.tokens[name], quick.log_probs[name]) == (tokens, stock.log_probs[name])


class Plain:
    """vLLM's memory that a GPU reads, without a GPU."""

    def __init__(self, size: Any, dtype: Any):
        import torch

        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace vLLM's kernels by their meaning, and let `install` undo itself."""
    import torch
    from vllm.v1.worker.gpu import buffer_utils, model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from instep_engine.vllm.fast import runner

    def positions(index: Any, starts: Any, computed: Any, pos: Any, lengths: Any) -> None:
        n = len(index)
        lengths[:n], lengths[n:] = computed[index] + starts[1 : n + 1] - starts[:n], 0
        for i in range(n):
            begin, end = int(starts[i]), int(starts[i + 1])
            pos[begin:end] = computed[index[i]] + torch.arange(end - begin)

    def combine(ids: Any, index: Any, last: Any, starts: Any, lengths: Any, prefill: Any, *_: Any) -> Any:
        rows = starts[1 : len(index) + 1].long() - 1
        decodes = lengths[: len(index)] > prefill[index]
        ids[rows[decodes]] = last[index, 0][decodes].int()
        return rows

    def copy(x: Any, out: Any = None, device: Any = None) -> Any:
        x = torch.from_numpy(x).clone()
        return x if out is None else out.copy_(x)

    for module, name, value in (
        (model_runner, "prepare_pos_seq_lens", positions),
        (model_runner, "combine_sampled_and_draft_tokens", combine),
        (model_runner, "prepare_prefill_inputs", lambda *_: None),
        (model_runner, "async_copy_to_gpu", copy),
        (buffer_utils, "UvaBuffer", Plain),
        (buffer_utils.StagedWriteTensor, "apply_write", lambda self: None),
        (runner, "HAS_TRITON", True),
        *((model_runner.GPUModelRunner, name, None) for name in ("prepare_inputs", "_dummy_run")),
        *((Sampler, name, None) for name in ("add_request", "apply_staged_writes")),
    ):
        monkeypatch.setattr(module, name, value or getattr(module, name))


def make_runner() -> Any:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    made, cpu = object.__new__(GPUModelRunner), torch.device("cpu")
    made.req_states = RequestState(8, MAX_LEN, 64, 0, 256, cpu)
    made.input_buffers, made.sampler = InputBuffers(8, 64, cpu), Sampler(8, 256, cpu, made.req_states)
    made.device, made.max_num_reqs, made.decode_query_len, made.pcp_manager = cpu, 8, 1, None
    made.use_dcp = made.use_pp = False
    made.model_config, made.model_state = SimpleNamespace(rswa_window=None), SimpleNamespace()
    made.model_state.num_new_sampled_tokens_per_step = 1
    return made


def test_inputs_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one and more tokens, some computed in parts; requests leave and come back."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from instep_engine.vllm.fast import runner

    on_cpu(monkeypatch)
    runner_class, numbers, num_again = model_runner.GPUModelRunner, random.Random(0), 0
    stock_methods = runner_class.prepare_inputs, Sampler.add_request, Sampler.apply_staged_writes
    runner.install()
    ours, theirs = make_runner(), make_runner()
    prompts: dict[str, int] = {}
    computed: dict[str, int] = {}
    for i in range(600):
        step = SchedulerOutput.make_empty()
        if numbers.random() < 0.1 and computed:
            gone = numbers.choice(list(computed))
            computed.pop(gone)
            for side in (ours, theirs):
                side.req_states.remove_request(gone)
        if numbers.random() < 0.15 and len(computed) < 8:
            new = numbers.choice([name for name in "abcdefghij" if name not in computed])
            prompts[new], computed[new] = numbers.choice([1, 2, 9]), 0
            params = SamplingParams(temperature=numbers.random(), top_p=numbers.random(), seed=i)
            step.scheduled_new_reqs = [new]
            for side, add in ((ours, Sampler.add_request), (theirs, stock_methods[1])):
                side.req_states.add_request(new, prompts[new], [5] * prompts[new], 0, 100)
                side.req_states.prefill_len.copy_to_uva()
                add(side.sampler, side.req_states.req_id_to_index[new], prompts[new], params)
        if not computed:
            continue
        names = list(computed)[: numbers.choice([8, 8, 8, 3])][:: numbers.choice([1, 1, 1, -1])]
        step.num_scheduled_tokens = {
            name: min(numbers.choice([1, 1, 4]), max(1, prompts[name] - computed[name])) for name in names
        }
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.has_structured_output_requests = numbers.random() < 0.5
        padded = max(-(-len(names) // 4) * 4, numbers.choice([1, 1, 1, 8]))
        graph = SimpleNamespace(num_tokens=max(padded, step.total_num_scheduled_tokens), num_reqs=padded)
        batches = []
        last = numbers.choices(range(256), k=8)
        for side in (ours, theirs):
            states = side.req_states
            for name, count in computed.items():
                index = states.req_id_to_index[name]
                states.num_computed_tokens_np[index] = states.num_computed_tokens.gpu[index] = count
            states.num_computed_prefill_tokens[:] = states.num_computed_tokens_np.clip(max=states.prefill_len.np)
            states.last_sampled_tokens[:, 0] = torch.tensor(last)
        for side, (prepare, _, apply) in (
            (ours, (runner_class.prepare_inputs, None, Sampler.apply_staged_writes)),
            (theirs, stock_methods),
        ):
            apply(side.sampler)
            before = getattr(side, "_instep_last", None)
            batches.append(prepare(side, step, graph))
            num_again += side is ours and before is not None and before is side._instep_last
        for name, value in vars(batches[1]).items():
            own = getattr(batches[0], name)
            same = (
                torch.equal(torch.as_tensor(own), torch.as_tensor(value)) if hasattr(value, "shape") else own == value
            )
            assert same, (i, name, own, value)
        for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
            assert torch.equal(getattr(ours.input_buffers, name), getattr(theirs.input_buffers, name)), (i, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            a, b = (getattr(side.sampler.sampling_states, name).gpu for side in (ours, theirs))
            assert torch.equal(a, b), (i, name)
        for name in names:
            computed[name] += step.num_scheduled_tokens[name]
    assert 100 < num_again < 500

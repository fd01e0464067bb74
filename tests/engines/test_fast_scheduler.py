"""The scheduler of fast requests against a worker whose every answer is known, with chunked prompts and preemptions.

With vLLM 0.26 this runs the short loops, too; with later versions what they have in common.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bounds import until
from tests.engines.fake_vllm import response
from tests.engines.running import Engine, make_checkpoint, run_engine
from tests.engines.test_fast_log_probs import fast, metric, num_running, stock

pytestmark = pytest.mark.vllm
FLAGS = (
    "--worker-cls tests.engines.fake_vllm.Worker --max-num-seqs 16 --enable-chunked-prefill "
    "--max-num-batched-tokens 64 --kv-cache-memory-bytes 51200 --max-model-len 1024"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("fake")
    hf = make_checkpoint(folder / "model", tied=True, max_len=1024)
    with run_engine(
        "vllm", folder / "model", hf, folder / "log", *FLAGS.split(), module="tests.engines.fake_vllm"
    ) as e:
        yield e
    log = (folder / "log").read_text()
    assert ("short loops for steps" in log) == e.capabilities.version.startswith("0.26")


def said(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["log_probs"]


@pytest.mark.parametrize("share_of_stock", [0.0, 0.2])
def test_every_token_and_log_prob_is_right(served: Engine, share_of_stock: float) -> None:
    numbers = random.Random(1)

    def one(prompt: list[int], num_tokens: int, stops: list[int] | None, is_stock: bool, wait: float) -> None:
        time.sleep(wait)
        params = {"max_tokens": num_tokens, "ignore_eos": True, **({"stop_token_ids": stops} if stops else {})}
        (choice,) = (stock if is_stock else fast)(served, prompt, **params)
        assert said(choice) == response(prompt, num_tokens, stops)
        ended = stops is not None and choice["token_ids"][-1] in stops
        assert choice["finish_reason"] == ("stop" if ended else "length")

    def several(lengths: list[int], seconds: float) -> None:
        jobs = []
        for i in range(60):
            prompt = [numbers.randrange(3, 250) for _ in range(numbers.choice([5, 15, 16, 17, 32, 100, 200]))]
            num_tokens = numbers.choice(lengths)
            stops = [response(prompt, num_tokens)[0][num_tokens // 2]] if i % 4 == 1 else None
            is_stock = numbers.random() < share_of_stock
            jobs.append(served.pool.submit(one, prompt, num_tokens, stops, is_stock, seconds * numbers.random()))
        for job in jobs:
            job.result(timeout=120)

    before = metric(served, "vllm:num_preemptions_total{")
    several([1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 300], 1.0)
    for _ in range(5):  # on a busy machine requests arrive so slowly that few are there at a time: longer ones meet
        if metric(served, "vllm:num_preemptions_total{") > before:
            break
        several([300, 500, 700], 0.0)
    assert metric(served, "vllm:num_preemptions_total{") > before
    check_idle(served)


def test_pauses_and_forced_preemptions_lose_nothing(served: Engine) -> None:
    prompts = [[5 + i] * (20 + i) for i in range(12)]
    asked = [
        served.pool.submit(fast, served, prompt, max_tokens=400 + i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    for _ in range(3):
        time.sleep(0.3)
        served.ok("/pause?mode=keep&clear_cache=false")
        served.ok("/reset_prefix_cache?reset_running_requests=true")
        served.ok("/resume")
        time.sleep(0.2)
        served.ok("/reset_prefix_cache?reset_running_requests=true")  # with a step under way
    for i, (prompt, done) in enumerate(zip(prompts, asked, strict=True)):
        assert said(done.result(timeout=120)[0]) == response(prompt, 400 + i)
    check_idle(served)


@pytest.mark.parametrize("route", ["/pause?mode=abort", "/abort_requests"])
def test_an_abort_returns_a_beginning(served: Engine, route: str) -> None:
    prompts = [[5 + i] * (20 + i) for i in range(12)]
    asked = [served.pool.submit(fast, served, prompt, max_tokens=900, ignore_eos=True) for prompt in prompts]
    until(lambda: num_running(served) + metric(served, "vllm:num_requests_waiting{") == len(prompts))
    served.ok(route)
    served.ok("/resume")
    choices = [done.result(timeout=60)[0] for done in asked]
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    for prompt, choice in zip(prompts, choices, strict=True):
        assert said(choice) == response(prompt, len(choice["token_ids"]))
    assert any(choice["token_ids"] for choice in choices)
    check_idle(served)


def check_idle(engine: Engine) -> None:
    """Nothing runs, and a further request gets what it should."""
    (choice,) = fast(engine, [9] * 40, max_tokens=40, ignore_eos=True)
    assert said(choice) == response([9] * 40, 40)
    deadline = time.monotonic() + 30
    while num_running(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class Below:
    """The scheduler below the mixin, with one fast request of at most 100 tokens, `a`."""

    requests: dict[str, Any] = field(default_factory=dict)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        from vllm.v1.engine import EngineCoreOutputs

        return {0: EngineCoreOutputs(outputs=[model_runner_output])}


def above() -> tuple[Any, Any]:
    """A scheduler of the mixin alone, and its request."""
    from vllm import SamplingParams

    from instep_engine.vllm.fast import KEY
    from instep_engine.vllm.fast.hold_back import HoldBack

    params = SamplingParams(max_tokens=100, logprobs=0, ignore_eos=True, extra_args={KEY: 1})
    request = SimpleNamespace(
        request_id="a", sampling_params=params, output_token_ids=[], max_tokens=100, resumable=False, client_index=0
    )
    scheduler = type("Scheduler", (HoldBack, Below), {})()
    scheduler.add_request(request)
    return scheduler, request


def output_of(request: Any, token: int, *, first: bool = False, last: bool = False) -> Any:
    """vLLM's output with the next token of the request, which is of rank 7."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    request.output_token_ids.append(token)
    output = EngineCoreOutput("a", [token])
    output.new_logprobs = LogprobsLists(np.array([[token]]), np.array([[-1.0]]), np.array([7]))
    output.prefill_stats = object() if first else None
    output.finish_reason = FinishReason.LENGTH if last else None
    return output


def test_the_routed_experts_of_tokens_that_are_held_back_leave_with_them() -> None:
    """A mixture's engine, whose scheduler adds the experts of the prompt to the first token, then a row to each."""
    from instep_engine.vllm.fast import BUNCH

    scheduler, request = above()
    sent, num = [], BUNCH + 5
    rows = np.arange(2 * (10 + num - 1)).reshape(-1, 2, 1)  # of a prompt of 10 tokens, and of all but the last
    for i in range(num):
        output = output_of(request, i, first=i == 0, last=i == num - 1)
        output.routed_experts = rows[:10] if i == 0 else rows[9 + i : 10 + i]
        sent += scheduler.update_from_output(None, output)[0].outputs
    assert 1 < len(sent) <= 4 and sum((o.new_token_ids for o in sent), []) == list(range(num))
    assert np.array_equal(np.concatenate([o.routed_experts for o in sent]), rows)


def test_every_token_is_marked_with_the_weights_that_made_it() -> None:
    """What is held back leaves before the engine core hears of other weights."""
    from instep_engine.vllm.fast import versions

    class Core:
        instep_set_version: Any

    versions.install(Core)
    core, (scheduler, request) = Core(), above()
    core.scheduler = scheduler  # type: ignore[attr-defined]
    marks: list[int] = []

    def step(i: int, **how: bool) -> None:
        for message in scheduler.update_from_output(None, output_of(request, i, **how))[0].outputs:
            marks.extend(message.new_logprobs.sampled_token_ranks.tolist())

    core.instep_set_version("0")
    for i in range(40):
        step(i, first=i == 0)
    marks.extend(mark for _, out in scheduler.flush() for mark in out.new_logprobs.sampled_token_ranks.tolist())
    core.instep_set_version("12")
    for i in range(40, 45):
        step(i, last=i == 44)
    assert versions.spans(marks) == [
        {"version": "0", "start": 0, "end": 40},
        {"version": "12", "start": 40, "end": 45},
    ]


@pytest.mark.parametrize(("version", "is_known"), [("3", True), ("mine", False), ("", False)])
def test_a_response_of_one_token_is_marked_too(version: str, is_known: bool) -> None:
    """The rank that vLLM gave it is no mark; a version that is no number is not known."""
    from instep_engine.vllm.fast import versions

    scheduler, request = above()
    versions._set_version(SimpleNamespace(scheduler=scheduler), version)
    del scheduler.requests["a"]  # as it ends with this token
    (message,) = scheduler.update_from_output(None, output_of(request, 5, first=True, last=True))[0].outputs
    spans = versions.spans(message.new_logprobs.sampled_token_ranks.tolist())
    assert spans == ([{"version": version, "start": 0, "end": 1}] if is_known else [])
    assert versions.spans([7]) == versions.spans([-4, None]) == versions.spans([]) == []

"""Requests of rollouts to a running embedded engine: of a group together, of one sample, and what ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from instep.engines.engine import Engine
from instep.errors import EngineError, RolloutError
from instep.rollout import client, runtime
from instep.rollout.client import to_vllm
from instep.rollout.http import post, post_json
from instep.rollout.tokens import token_texts
from instep.rollout.vllm_rollout import generate, generate_rollout
from instep.system.ports import free_port
from instep.types import Sample
from tests.bounds import allowed, until
from tests.engines.rollouts import calls, rollout, source_of, start_engine

ME = __name__


# ---- one request for a group


async def alone(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function of a user's own."""
    calls.append(sample.index)
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("num_slots", [None, "2"])
def test_a_group_in_one_request_gets_what_its_samples_get_alone(
    make_args: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_slots: str | None
) -> None:
    requests = []

    async def counted(url: str, payload: dict[str, Any], **options: Any) -> Any:
        requests.append(payload["sampling_params"].get("n", 1))
        return await post_json(url, payload, **options)

    monkeypatch.setattr(client, "post_json", counted)
    more = ["--n-samples-per-prompt", "5", *(["--vllm-max-num-seqs", num_slots] if num_slots else [])]
    together = rollout(make_args(*more)).samples
    assert requests == [5] * 4
    own = ["--custom-generate-function-path", f"{ME}.alone"]
    assert [[s.tokens for s in g] for g in rollout(make_args(*more, *own)).samples] == [
        [s.tokens for s in g] for g in together
    ]
    assert len(calls) == 20 and requests[4:] == [1] * 20
    one_by_one = rollout(make_args(*more, "--no-fast-log-probs", kind="vllm")).samples  # a request for each
    assert requests[24:] == [1] * 20
    for ours, theirs in zip(together, one_by_one, strict=True):
        assert [s.tokens for s in ours] == [s.tokens for s in theirs]
        assert len({tuple(s.tokens) for s in ours}) > 1
        assert [s.sampling_params for s in ours] == [s.sampling_params for s in theirs]
        assert [(s.status, s.response, s.reward) for s in ours] == [(s.status, s.response, s.reward) for s in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.rollout_log_probs == pytest.approx(b.rollout_log_probs, abs=1e-4)


# ---- one request


def generate_one(args: Any, prompt: Any, **params: Any) -> Sample:
    sample = Sample(group_index=0, index=0, prompt=prompt)
    return runtime.run(generate(args, sample, {"max_new_tokens": 60, "seed": 1, **params}), timeout=30)


def test_an_engine_that_returns_no_experts_cannot_be_replayed(make_args: Callable[..., Any]) -> None:
    parsed, runtime_values = make_args().__reduce__()[1]
    args = parsed.replace(use_rollout_routing_replay=True).view(runtime_values)
    with pytest.raises(EngineError, match="no routed experts") as error:
        generate_one(args, "1+1=")
    assert "--enable-return-routed-experts" in error.value.remedy


def test_stop_strings_are_cut_from_the_text_only(make_args: Callable[..., Any]) -> None:
    args = make_args()
    free = generate_one(args, "abc", temperature=0.0, skip_special_tokens=False)
    stop = free.response[10:12]
    at = free.response.find(stop)
    assert len(stop) == 2
    stopped = generate_one(args, "abc", temperature=0.0, skip_special_tokens=False, stop=[stop])
    assert stopped.status is Sample.Status.COMPLETED
    assert stopped.response == free.response[:at]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)] and stopped.response_length < free.response_length
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(args.hf_checkpoint).decode(stopped.tokens[3:])
    assert stop in text and len(stopped.rollout_log_probs) == stopped.response_length


def test_a_stop_string_that_an_abort_has_parted_ends_the_response(make_args: Callable[..., Any]) -> None:
    args, params = make_args(), {"temperature": 0.0, "skip_special_tokens": False}
    free = generate_one(args, "abc", **params)
    texts = token_texts(args, free.tokens[3:])
    pairs = [one[-1:] + two[:1] for one, two in pairwise(texts[4:30])]
    stop = next(p for p in pairs if len(p) == 2 and p.isascii() and not any(p in text for text in texts))
    whole = generate_one(args, "abc", **params, stop=[stop])
    k = whole.response_length - 1
    assert k + 1 < free.response_length and whole.response == "".join(texts[: k + 1]).partition(stop)[0]
    sample = Sample(group_index=0, index=0, prompt="abc", tokens=whole.tokens[:3])
    sample.append_response_tokens(whole.tokens[3:][:k], whole.rollout_log_probs[:k])
    sample.status = Sample.Status.ABORTED
    runtime.run(generate(args, sample, {"max_new_tokens": 60, "seed": 1, **params, "stop": [stop]}), timeout=30)
    assert (sample.tokens, sample.response, sample.status) == (whole.tokens, whole.response, whole.status)
    assert len(sample.rollout_log_probs) == k + 1


def test_two_turns_with_a_tool_between(make_args: Callable[..., Any], tiny_model: Path) -> None:
    args = make_args("--partial-rollout", "--mask-offpolicy-in-partial-rollout")
    one = generate_one(args, "abc", max_new_tokens=8, ignore_eos=True)
    assert one.status is Sample.Status.TRUNCATED and one.response_length == 8
    one.append_response_tokens([9, 9, 9], trainable=False)
    two = runtime.run(generate(args, one, {"max_new_tokens": 20, "min_new_tokens": 20, "seed": 1}), timeout=30)
    assert two.response_length == 20  # the budget is that of all turns
    assert two.loss_mask == [1] * 8 + [0] * 3 + [1] * 9  # a further turn is no continuation of an aborted one
    assert [(s.start, s.end) for s in two.weight_versions] == [(0, 8), (11, 20)]
    assert two.rollout_log_probs[8:11] == [0.0] * 3 and all(x < 0 for x in two.rollout_log_probs[11:])


def test_messages_and_rendered_text_give_the_same_tokens(make_args: Callable[..., Any]) -> None:
    args = make_args()
    messages = [{"role": "user", "content": "1 + 1 ="}]
    rendered = "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    assert generate_one(args, messages).tokens == generate_one(args, rendered).tokens


def test_the_context_bound(make_args: Callable[..., Any]) -> None:
    prompt_length = generate_one(make_args(), [{"role": "user", "content": "0 + 0 ="}]).prompt_length
    args = make_args("--rollout-max-context-len", str(prompt_length + 5), "--rollout-batch-size", "1")
    group = rollout(args).samples[0]
    assert all(len(s.tokens) <= prompt_length + 5 for s in group) and max(s.response_length for s in group) == 5


def test_refusals_and_dead_addresses_are_named(make_args: Callable[..., Any], server: Engine) -> None:
    url = f"{server.url}/inference/v1/generate"
    with pytest.raises(EngineError, match="refused with 400") as caught:
        runtime.run(post(url, {"token_ids": [1], "sampling_params": {"temprature": 1}}), timeout=20)
    assert caught.value.where == url and "temprature" in str(caught.value)
    dead = f"http://127.0.0.1:{free_port()}/inference/v1/generate"
    start = time.monotonic()
    with pytest.raises(EngineError, match="5 attempts failed") as caught:
        runtime.run(post(dead, {}), timeout=20)
    assert caught.value.where == dead and time.monotonic() - start < allowed(6)
    with pytest.raises(RolloutError, match="unknown sampling parameter 'temprature'"):
        to_vllm({"temprature": 1.0})
    with pytest.raises(EngineError, match="no answer within"):
        long = {"token_ids": [1], "sampling_params": {"max_tokens": 1000, "ignore_eos": True}}
        runtime.run(post(url, long, timeout=0.05), timeout=20)


# ---- what ends a rollout


ENDLESS = ["--rollout-max-response-len", "900", "--rollout-batch-size", "16"]
ENDLESS += ["--custom-generate-function-path", f"{ME}.without_end"]


async def without_end(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    failure: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failure.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, failure


def test_an_engine_killed_during_a_rollout(make_args: Callable[..., Any], tiny_model: Path, tmp_path: Path) -> None:
    victim = start_engine(tiny_model, tmp_path)
    args = make_args(*ENDLESS, url=victim.url)
    thread, failure = in_thread(lambda: generate_rollout(args, 0, source_of(args)))
    until(lambda: failure or sum(runtime.state().requests_in_flight.values()))
    time.sleep(0.2)
    assert thread.is_alive() and victim.process is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    start = time.monotonic()
    thread.join(60)
    assert not thread.is_alive() and time.monotonic() - start < allowed(6)
    assert isinstance(failure[0], EngineError) and victim.url in failure[0].where and failure[0].remedy
    victim.stop()


def test_cancel_all_ends_a_rollout_at_once(make_args: Callable[..., Any], server: Engine) -> None:
    args = make_args(*ENDLESS)
    thread, failure = in_thread(lambda: generate_rollout(args, 0, source_of(args)))
    until(lambda: failure or sum(runtime.state().requests_in_flight.values()))
    assert thread.is_alive()
    start = time.monotonic()
    runtime.cancel_all(EngineError("engine 0 died"))
    thread.join(60)
    assert not thread.is_alive() and time.monotonic() - start < allowed(1)
    assert isinstance(failure[0], EngineError) and failure[0].what == "engine 0 died"
    rollout(make_args())  # engine and loop are as good as new

"""The rollout side against a running embedded engine: nothing between the two is faked."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.arguments import parse
from instep.controller.ledger import Ledger, LedgeredDataSource
from instep.data.source import RolloutDataSourceWithBuffer
from instep.engines.engine import Engine
from instep.errors import EngineError, RewardError, RolloutError
from instep.ports import free_port
from instep.processes import SupervisedProcess
from instep.rollout import runtime, vllm_rollout
from instep.rollout.client import complete_n, to_vllm
from instep.rollout.http import post
from instep.rollout.outputs import as_train_output
from instep.rollout.vllm_rollout import generate, generate_rollout
from instep.types import Sample, VersionSpan
from tests.assets import make_checkpoint

ME = __name__
NUM_PROMPTS = 24


# ---- a tiny checkpoint, its engine, its data ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", max_len=1024)


def start_engine(checkpoint: Path, folder: Path) -> Engine:
    port = free_port()
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(checkpoint), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    engine = Engine("engine 0", f"http://127.0.0.1:{port}", SupervisedProcess("engine 0", command, folder / "log.txt"))
    engine.wait_ready(120)
    return engine


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = start_engine(checkpoint, tmp_path_factory.mktemp("engine"))
    yield engine
    runtime.shutdown()
    engine.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{i} + {i} ="}], "label": str(2 * i)} for i in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_args(checkpoint: Path, data: Path, server: Engine) -> Callable[..., Any]:
    """Arguments by the real parser, as hooks get them."""

    def make(*extra: str, url: str = server.url) -> Any:
        argv = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--input-key", "prompt"]
        argv += ["--label-key", "label", "--apply-chat-template", "--num-rollout", "3", "--rollout-batch-size", "4"]
        argv += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "12", "--rollout-timeout", "60"]
        argv += ["--actor-num-gpus-per-node", "1"]
        reward = [] if "--rm-type" in extra else ["--custom-rm-path", f"{ME}.parity"]
        reward = [] if "--custom-rm-path" in extra else reward
        port = int(url.rsplit(":", 1)[1])
        return parse([*argv, *reward, *extra]).view(
            {
                "vllm_router_ip": "127.0.0.1",
                "vllm_router_port": port,
                "vllm_model_routers": {"actor": ("127.0.0.1", port)},
                "rollout_engine_urls": [url],
                "num_rollout": 3,
            }
        )

    return make


def source_of(args: Any) -> LedgeredDataSource:
    return LedgeredDataSource(RolloutDataSourceWithBuffer(args), Ledger())


def rollout(args: Any, source: LedgeredDataSource | None = None, rollout_id: int = 0) -> Any:
    """One rollout as the controller runs it: the ledger must balance, and nothing may be left over."""
    source = source or source_of(args)
    output = as_train_output(generate_rollout(args, rollout_id, source))
    source.ledger.consume(output.samples)
    source.ledger.check()
    assert source.ledger.num_outstanding == 0
    assert len(output.samples) == args.rollout_batch_size
    indices = [group[0].group_index for group in output.samples]
    assert indices == sorted(indices)
    return output


# ---- hooks ----------------------------------------------------------------------------------------------------------

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    calls.clear()


async def parity(args: Any, sample: Sample) -> float:
    """A reward that varies within a group of a random model."""
    return float(sum(sample.tokens[-sample.response_length :]) % 2)


def test_what_a_rollout_returns(make_args: Callable[..., Any], checkpoint: Path) -> None:
    args = make_args()
    seen: list[Any] = []
    runtime.set_progress_listener(lambda done, total, extra: seen.append((done, total, extra)))
    output = rollout(args)
    runtime.set_progress_listener(None)
    assert seen[-1][:2] == (4, 4) and seen[-1][2]["num_filtered"] == 0
    samples = [s for group in output.samples for s in group]
    assert len(samples) == 8 and [s.index for s in samples] == list(range(8))
    assert output.metrics["rollout/num_tokens_generated"] == sum(s.response_length for s in samples)
    version = samples[0].weight_versions[0].version
    for sample in samples:
        assert sample.prompt.endswith("<|im_start|>assistant\n")
        assert 1 <= sample.response_length <= 12
        assert sample.weight_versions == [VersionSpan(version, 0, sample.response_length)]
        assert sample.truncated == (sample.response_length == 12) or sample.tokens[-1] == eos(checkpoint)
        assert sample.reward in (0.0, 1.0)
        assert sample.sampling_params["temperature"] == 1.0 and sample.sampling_params["max_tokens"] == 12
    assert len({s.sampling_params["seed"] for s in samples}) == 8
    assert len({s.execution_id for s in samples}) == 8
    check_log_probs(checkpoint, samples)
    again = rollout(args)
    assert [s.tokens for g in again.samples for s in g] == [s.tokens for s in samples]  # the seeds decide


def eos(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text())["eos_token_id"])


def check_log_probs(checkpoint: Path, samples: list[Sample]) -> None:
    """The engine's log-probs against transformers, token by token: they are aligned, and of these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for sample in samples:
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            all_log_probs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        want = all_log_probs.gather(1, ids[1:, None])[:, 0][-sample.response_length :]
        got = torch.tensor(sample.rollout_log_probs)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-4


def keep_odd_groups(args: Any, group: list[Sample]) -> bool:
    return bool(group[0].group_index % 2)


async def see_all(args: Any, groups: list[list[Sample]], source: Any) -> None:
    calls.append(sorted(group[0].group_index for group in groups))


def mark_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def test_over_sampling_with_a_filter(make_args: Callable[..., Any]) -> None:
    args = make_args(
        *("--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{ME}.keep_odd_groups"),
        *("--rollout-all-samples-process-path", f"{ME}.see_all", "--rollout-sample-filter-path", f"{ME}.mark_first"),
    )
    source = source_of(args)
    output = rollout(args, source)
    indices = [group[0].group_index for group in output.samples]
    assert all(i % 2 for i in indices)
    assert set(indices) <= set(calls[0]) and any(i % 2 == 0 for i in calls[0])
    assert output.samples[0][0].remove_sample and not output.samples[1][0].remove_sample
    filtered = source.ledger.dropped["filtered:keep_odd_groups"]
    assert filtered == output.metrics["rollout/num_groups_filtered"] >= 3
    assert source.ledger.num_issued % 6 == 0
    assert source.ledger.num_issued == 4 + sum(source.ledger.dropped.values())


def test_the_built_in_filter(make_args: Callable[..., Any]) -> None:
    path = "instep.rollout.filters.check_reward_nonzero_std"
    output = rollout(make_args("--dynamic-sampling-filter-path", path))
    assert all({s.reward for s in group} == {0.0, 1.0} for group in output.samples)


def keep_nothing(args: Any, group: list[Sample]) -> bool:
    return False


def test_a_filter_that_keeps_nothing_ends(make_args: Callable[..., Any]) -> None:
    args = make_args(
        *("--dynamic-sampling-filter-path", f"{ME}.keep_nothing", "--rollout-batch-size", "1"),
        *("--rollout-max-response-len", "1"),
    )
    with pytest.raises(RolloutError, match="51 groups were thrown away and 0 of 1 kept: 51 keep_nothing") as caught:
        generate_rollout(args, 0, source_of(args))
    assert "change the data" in caught.value.remedy


# ---- partial rollouts -----------------------------------------------------------------------------------------------

LONG = ["--rollout-max-response-len", "400"]


def partials(make_args: Callable[..., Any], server: Engine, *extra: str) -> tuple[list[Sample], dict[int, int], Any]:
    """Two rollouts, the weight version set between them; the continued samples and how long they were then."""
    args = make_args(
        "--partial-rollout", "--over-sampling-batch-size", "10", "--rollout-batch-size", "2", *LONG, *extra
    )
    source = source_of(args)
    server.post("/update_weight_version", {"new_version": "1"}, timeout=10)
    rollout(args, source)
    buffer = copy.deepcopy(source.source.buffer)
    assert source.ledger.num_buffered == len(buffer) == 8 and not source.ledger.dropped
    lengths = {s.index: s.response_length for group in buffer for s in group if s.aborted}
    assert lengths and any(lengths.values())
    server.post("/update_weight_version", {"new_version": "2"}, timeout=10)
    done: list[Sample] = []
    while source.source.buffer and len(done) < 6:
        output = rollout(args, source, 1)
        done += [s for group in output.samples for s in group if s.index in lengths]
    return done, lengths, buffer


def test_partial_rollouts_are_continued(make_args: Callable[..., Any], server: Engine, checkpoint: Path) -> None:
    done, lengths, buffer = partials(make_args, server)
    before = {s.index: s for group in buffer for s in group}
    continued = [s for s in done if 0 < lengths[s.index] < s.response_length]
    assert continued
    for sample in continued:
        k, n = lengths[sample.index], sample.response_length
        old = before[sample.index]
        assert sample.tokens[: len(old.tokens)] == old.tokens and n <= 400
        assert sample.rollout_log_probs[:k] == old.rollout_log_probs and len(sample.rollout_log_probs) == n
        assert sample.weight_versions[0] == VersionSpan("1", 0, k)
        assert sample.weight_versions[1].start == k and sample.weight_versions[-1] == VersionSpan("2", k, n)
        assert sample.loss_mask is None and sample.reward is not None
        assert sample.truncated == (n == 400) or sample.tokens[-1] == eos(checkpoint)
    check_log_probs(checkpoint, continued)


def test_continued_samples_can_be_masked(make_args: Callable[..., Any], server: Engine) -> None:
    done, lengths, _ = partials(make_args, server, "--mask-offpolicy-in-partial-rollout")
    continued = [s for s in done if 0 < lengths[s.index] < s.response_length]
    assert continued
    for sample in continued:
        k = lengths[sample.index]  # a sample may have been aborted once more, later on
        assert len(sample.loss_mask) == sample.response_length and sample.loss_mask[-1] == 1
        assert sample.loss_mask == sorted(sample.loss_mask) and not any(sample.loss_mask[:k])
    assert any(s.loss_mask.index(1) == lengths[s.index] for s in continued)


def test_without_partial_rollouts_the_rest_is_dropped(make_args: Callable[..., Any], server: Engine) -> None:
    args = make_args("--over-sampling-batch-size", "10", "--rollout-batch-size", "2", *LONG)
    source = source_of(args)
    rollout(args, source)
    assert not source.source.buffer and sum(source.ledger.dropped.values()) == 8
    assert set(source.ledger.dropped) <= {"aborted", "surplus"} and source.ledger.dropped["aborted"]


def test_an_abort_by_somebody_else_is_continued(
    make_args: Callable[..., Any], server: Engine, checkpoint: Path
) -> None:
    args = make_args("--rollout-max-response-len", "300", "--rollout-batch-size", "8")
    source = source_of(args)
    stop, aborted = threading.Event(), []

    def disturb() -> None:
        while not stop.wait(0.05) and len(aborted) < 50:  # a sample is continued 100 times
            aborted.append(server.post("/abort_requests", {}, timeout=10)["aborted"])

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        output = rollout(args, source)
    finally:
        stop.set()
        disturber.join()
    assert sum(aborted) > 0 and source.ledger.num_issued == 8  # none was thrown away
    samples = [s for group in output.samples for s in group]
    assert all(s.response_length == 300 or s.tokens[-1] == eos(checkpoint) for s in samples)
    check_log_probs(checkpoint, samples)


# ---- hooks of the seeds ---------------------------------------------------------------------------------------------

TOKENIZER = None


async def seed_generate(args, sample: Sample, sampling_params) -> Sample:
    """The example of the seeds' usage guide ("Custom Rollout Function"), word for word but for its imports."""
    from transformers import AutoTokenizer

    global TOKENIZER
    if TOKENIZER is None:
        TOKENIZER = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)

    # send request to router
    prompt_token_ids = TOKENIZER(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(
        f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate",
        {
            "model": args.hf_checkpoint,
            "token_ids": prompt_token_ids,
            "sampling_params": {"max_tokens": sampling_params["max_new_tokens"]},
        },
    )

    choice = output["choices"][0]
    response_token_ids = list(choice.get("token_ids") or [])

    # set sample
    sample.tokens = prompt_token_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    finish_reason = choice.get("finish_reason") or "stop"
    if finish_reason == "length":
        sample.status = Sample.Status.TRUNCATED
    elif finish_reason in ("abort", "cancelled"):
        sample.status = Sample.Status.ABORTED
    else:
        sample.status = Sample.Status.COMPLETED
    sample.response = TOKENIZER.decode(response_token_ids) if response_token_ids else ""

    return sample


def test_the_generate_function_of_the_seeds(make_args: Callable[..., Any]) -> None:
    output = rollout(make_args("--custom-generate-function-path", f"{ME}.seed_generate"))
    for sample in (s for group in output.samples for s in group):
        assert 1 <= sample.response_length <= 12
        assert sample.status in (Sample.Status.TRUNCATED, Sample.Status.COMPLETED) and sample.reward is not None
        assert sample.rollout_log_probs is None and sample.weight_versions == []  # unknown, and not invented


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> list[Sample]:
    calls.append(evaluation)
    first = await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
    second = copy.deepcopy(first)
    second.append_response_tokens([2, 2], trainable=False)
    second.metadata["part"] = 2
    return [first, second]


def test_fan_out(make_args: Callable[..., Any]) -> None:
    path = "instep.rollout.filters.check_reward_nonzero_std"
    args = make_args(
        *("--custom-generate-function-path", f"{ME}.fan_out", "--rollout-sample-hook-path", f"{ME}.sync_hook"),
        *("--rollout-sample-hook-path", f"{ME}.async_hook", "--dynamic-sampling-filter-path", path),
    )
    output = rollout(args, rollout_id=5)
    assert set(calls) == {False}
    for group in output.samples:
        assert len(group) == 4
        assert group[0].execution_id == group[1].execution_id != group[2].execution_id == group[3].execution_id
        assert [s.metadata.get("part") for s in group] == [None, 2, None, 2]
        assert all(s.reward is not None and s.metadata["hooked"] == [5, "async"] for s in group)
        assert group[1].loss_mask == [1] * (group[1].response_length - 2) + [0, 0]


def sync_hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata["hooked"] = [rollout_id]


async def async_hook(args: Any, sample: Sample) -> Sample:
    sample.metadata["hooked"].append("async")
    return sample


async def rank_in_group(args: Any, samples: list[Sample]) -> list[float]:
    calls.append([s.index for s in samples])
    return [float(i) for i in range(len(samples))]


def test_group_rewards(make_args: Callable[..., Any]) -> None:
    output = rollout(make_args("--group-rm", "--custom-rm-path", f"{ME}.rank_in_group"))
    assert sorted(calls) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0]] * 4


async def fails_on_five(args: Any, sample: Sample) -> float:
    return float("nan") if sample.index == 5 else 0.0


def test_a_failing_reward_ends_the_rollout(make_args: Callable[..., Any]) -> None:
    args = make_args("--custom-rm-path", f"{ME}.fails_on_five")
    with pytest.raises(RewardError, match="no finite number") as caught:
        generate_rollout(args, 0, source_of(args))
    assert caught.value.where == f"{ME}.fails_on_five: group 2, sample 5"


async def forgets_the_status(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length = [1, 2, 3], 1
    return sample


async def breaks(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample.metadata["missing"]


@pytest.mark.parametrize(("name", "message"), [("forgets_the_status", "still PENDING"), ("breaks", "KeyError")])
def test_a_bad_generate_function_is_named(make_args: Callable[..., Any], name: str, message: str) -> None:
    args = make_args("--custom-generate-function-path", f"{ME}.{name}")
    with pytest.raises(RolloutError, match=message) as caught:
        generate_rollout(args, 0, source_of(args))
    assert name in str(caught.value) and "group 0, sample 0" in caught.value.where


# ---- one request for a group ---------------------------------------------------------------------------------------


async def alone(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function of a user's own is called for each sample."""
    calls.append(sample.index)
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("num_slots", [None, "2"])
def test_a_group_in_one_request_gets_what_its_samples_get_alone(
    make_args: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_slots: str | None
) -> None:
    requests = []

    async def counted(*args: Any, **options: Any) -> Any:
        requests.append(args[4])
        return await complete_n(*args, **options)

    monkeypatch.setattr(vllm_rollout, "complete_n", counted)
    more = ["--n-samples-per-prompt", "5", *(["--vllm-max-num-seqs", num_slots] if num_slots else [])]
    together = rollout(make_args(*more)).samples
    assert sorted(requests) == ([1] * 4 + [2] * 8 if num_slots else [5] * 4)
    one_by_one = rollout(make_args(*more, "--custom-generate-function-path", f"{ME}.alone")).samples
    assert len(calls) == 20 and requests[-20:] == [1] * 20
    for ours, theirs in zip(together, one_by_one, strict=True):
        assert [s.tokens for s in ours] == [s.tokens for s in theirs]
        assert len({tuple(s.tokens) for s in ours}) > 1
        assert [s.sampling_params for s in ours] == [s.sampling_params for s in theirs]
        assert [(s.status, s.response, s.reward) for s in ours] == [(s.status, s.response, s.reward) for s in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.rollout_log_probs == pytest.approx(b.rollout_log_probs, abs=1e-4)


# ---- one request ----------------------------------------------------------------------------------------------------


def generate_one(args: Any, prompt: Any, **params: Any) -> Sample:
    sample = Sample(group_index=0, index=0, prompt=prompt)
    return runtime.run(generate(args, sample, {"max_new_tokens": 60, "seed": 1, **params}), timeout=30)


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


def test_two_turns_with_a_tool_between(make_args: Callable[..., Any], checkpoint: Path) -> None:
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
    assert caught.value.where == dead and time.monotonic() - start < 6
    with pytest.raises(RolloutError, match="unknown sampling parameter 'temprature'"):
        to_vllm({"temprature": 1.0})
    with pytest.raises(EngineError, match="no answer within"):
        long = {"token_ids": [1], "sampling_params": {"max_tokens": 1000, "ignore_eos": True}}
        runtime.run(post(url, long, timeout=0.05), timeout=20)


# ---- what ends a rollout --------------------------------------------------------------------------------------------

ENDLESS = ["--rollout-max-response-len", "900", "--rollout-batch-size", "16"]
ENDLESS += ["--custom-generate-function-path", f"{ME}.without_end"]


async def without_end(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    failure: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:  # handed to the test
            failure.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, failure


def test_an_engine_killed_during_a_rollout(make_args: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    victim = start_engine(checkpoint, tmp_path)
    args = make_args(*ENDLESS, url=victim.url)
    thread, failure = in_thread(lambda: generate_rollout(args, 0, source_of(args)))
    time.sleep(0.7)
    assert thread.is_alive() and victim.process is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    start = time.monotonic()
    thread.join(15)
    assert not thread.is_alive() and time.monotonic() - start < 6
    assert isinstance(failure[0], EngineError) and victim.url in failure[0].where and failure[0].remedy
    victim.stop()


def test_cancel_all_ends_a_rollout_at_once(make_args: Callable[..., Any], server: Engine) -> None:
    args = make_args(*ENDLESS)
    thread, failure = in_thread(lambda: generate_rollout(args, 0, source_of(args)))
    time.sleep(0.5)
    assert thread.is_alive()
    start = time.monotonic()
    runtime.cancel_all(EngineError("engine 0 died"))
    thread.join(5)
    assert not thread.is_alive() and time.monotonic() - start < 1
    assert isinstance(failure[0], EngineError) and failure[0].what == "engine 0 died"
    rollout(make_args())  # engine and loop are as good as new


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_on_two_sets(make_args: Callable[..., Any], tmp_path: Path) -> None:
    easy, other = tmp_path / "easy.jsonl", tmp_path / "other.jsonl"
    easy.write_text("".join(json.dumps({"prompt": f"{i}", "label": "1"}) + "\n" for i in range(3)))
    other.write_text("".join(json.dumps({"question": f"{i}?", "gold": "2"}) + "\n" for i in range(4)))
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"""
eval:
  defaults: {{temperature: 0.0}}
  datasets:
    - {{name: easy, path: {easy}, max_response_len: 5}}
    - name: other
      path: {other}
      input_key: question
      label_key: gold
      n_samples_per_eval_prompt: 2
      temperature: 1.0
      max_response_len: 7
      rm_type: math
      custom_generate_function_path: {ME}.evaluated
      metadata_overrides: {{kind: b}}
"""
    )
    args = make_args("--eval-config", str(config), "--eval-interval", "1")
    output = generate_rollout(args, 0, None, evaluation=True)
    assert set(output.data) == {"easy", "other"}
    first, second = output.data["easy"], output.data["other"]
    assert [len(first[k]) for k in ("rewards", "truncated", "samples")] == [3, 3, 3]
    assert [len(second[k]) for k in ("rewards", "truncated", "samples")] == [8, 8, 8]
    assert [s.prompt for s in first["samples"]] == [
        f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n" for i in range(3)
    ]
    assert first["rewards"] == [float(sum(s.tokens[-s.response_length :]) % 2) for s in first["samples"]]
    assert all(s.response_length <= 5 and s.sampling_params["temperature"] == 0.0 for s in first["samples"])
    assert second["rewards"] == [1.0] * 8  # by its own rm_type, although --custom-rm-path is given
    assert all(s.metadata["kind"] == "b" and s.label == "2" for s in second["samples"])
    assert calls == [(True, 7, 1.0)] * 8
    again = generate_rollout(args, 9, None, evaluation=True)
    assert [s.tokens for s in again.data["easy"]["samples"]] == [s.tokens for s in first["samples"]]
    assert len({tuple(s.tokens) for s in second["samples"]}) > 4  # n samples of one prompt differ


async def evaluated(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    calls.append((evaluation, sampling_params["max_new_tokens"], sampling_params["temperature"]))
    sample = await generate(args, sample, sampling_params)
    sample.response = r"so \boxed{2}"
    return sample

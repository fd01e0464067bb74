"""What a sample was drawn with: what is really sent is what the trainer scores; seeds of turns and evaluations."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from instep.arguments.parse import parse
from instep.data.batch import build_batch
from instep.data.sampling import distribution_of, note_request, record_turn, requests_noted, settle
from instep.errors import RolloutError
from instep.rollout import runtime
from instep.rollout.client import get_model_url
from instep.rollout.eval import evaluate
from instep.rollout.execute import new_execution, run_group, train_sampling_params
from instep.rollout.group_request import generate_group
from instep.rollout.http import post
from instep.rollout.vllm_rollout import generate
from instep.types import Sample, Status
from tests.assets import make_checkpoint, make_prompts

ME = __name__
JUDGE = 5  # a prompt that begins with this token asks for a verdict
sent: list[dict[str, Any]] = []  # the sampling parameters that the server got


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    sent.clear()
    yield
    runtime.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "hf", layers=1)
    make_prompts(folder / "rows.jsonl", 2)
    return folder


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[int]:
    """A server that answers every request with two tokens, of log-prob -1 each; yields its port."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        sent.append(params)
        content = [{"logprob": -1.0}] * 2
        ids = [11, 9] if body["token_ids"][0] == JUDGE else [7, 8]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
        return web.json_response({"choices": [choice] * params.get("n", 1)})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        sent.append(body)
        text = "Yes" if "Is it right" in body["messages"][0]["content"] else " Yes, it is 2. "
        return web.json_response({"choices": [{"message": {"content": text}}]})

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", answer), web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def view(checkpoint: Path, *flags: str, port: int = 1) -> Any:
    words = "--actor-num-gpus-per-node 1 --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2".split()
    words += ["--hf-checkpoint", str(checkpoint)]
    words += f"--prompt-data {checkpoint}/rows.jsonl --rm-type random --rollout-max-response-len 12".split()
    runtime_attributes = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": port, "rollout_engine_kind": "vllm"}
    return parse([*words, *flags]).view({**runtime_attributes, "rollout_engine_urls": []})


def group_of(n: int = 1) -> list[Sample]:
    return [Sample(group_index=3, index=i, prompt="1+1=") for i in range(n)]


def run(checkpoint: Path, *flags: str, group: list[Sample] | None = None) -> list[Sample]:
    """One group through its generate function."""

    async def scenario() -> list[Sample]:
        async with engine() as port:
            args = view(checkpoint, *flags, port=port)
            params = train_sampling_params(args)
            return await run_group(new_execution(args, 0), group or group_of(), params, generate_group)

    return runtime.run(scenario(), timeout=60)


async def hotter(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, {**sampling_params, "temperature": 0.5, "top_p": 0.9, "top_k": -1})


async def own_request(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """In the manner of slime's examples, which send the request themselves."""
    own = {"max_tokens": sampling_params["max_new_tokens"], "temperature": 0.5, "top_p": 0.9}
    answer = await post(get_model_url(args), {"token_ids": [1, 2], "sampling_params": own})
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens(answer["choices"][0]["token_ids"], [-1.0, -1.0])
    return sample


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await generate(args, sample, {**sampling_params, "temperature": 0.5})
    sample.append_response_tokens([2, 2], trainable=False)
    return await generate(args, sample, sampling_params)


async def first_turn_masked(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await generate(args, sample, {**sampling_params, "temperature": 0.0})
    sample.loss_mask, sample.rollout_log_probs = [0] * sample.response_length, None
    return await generate(args, sample, sampling_params)


async def siblings(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    out = []
    for temperature in (0.5, 0.8):
        out.append(await generate(args, copy.deepcopy(sample), {**sampling_params, "temperature": temperature}))
    return out


async def ask(args: Any, prompt: list[int], **params: Any) -> list[int]:
    answer = await post(get_model_url(args), {"token_ids": prompt, "sampling_params": {"max_tokens": 4, **params}})
    return list(answer["choices"][0]["token_ids"])


async def judged(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn, a verdict that only the reward reads, and another one that stands in the sample as an observation."""
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens(await ask(args, sample.tokens, temperature=0.7), [-1.0, -1.0])
    await ask(args, [JUDGE, *sample.tokens], temperature=0.0)
    sample.append_response_tokens(await ask(args, [JUDGE, 6], temperature=0.3), trainable=False)
    await post(get_model_url(args), {"token_ids": [9, 9], "sampling_params": {"prompt_logprobs": 0, "temperature": 2}})
    return sample


async def cut_at_a_stop(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The second turn's last token is left out; a candidate that loses is not in the sample at all."""
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens(await ask(args, sample.tokens, temperature=0.7), [-1.0, -1.0])
    await ask(args, [JUDGE, *sample.tokens], temperature=1.9)
    sample.append_response_tokens((await ask(args, sample.tokens, temperature=0.7, top_p=0.9))[:1], [-1.0])
    return sample


async def judges_by_chat(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Texts instead of ids, the policy's without a temperature."""
    url = get_model_url(args, endpoint="/v1/chat/completions")
    answer = await post(url, {"messages": [{"role": "user", "content": sample.prompt}]})
    sample.response, sample.status = answer["choices"][0]["message"]["content"].strip(), Status.COMPLETED
    judge = {"messages": [{"role": "user", "content": f"Is it right? {sample.response}"}], "temperature": 0.0}
    await post(url, judge)
    sample.tokens, sample.response_length = [1, 2, 3], 2
    return sample


async def explicit(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks at 0.5, and says that the sample is one of the run's temperature."""
    sample = await own_request(args, sample, sampling_params)
    sample.sampling_params = {**sampling_params, "max_tokens": sampling_params["max_new_tokens"]}
    del sample.sampling_params["max_new_tokens"]
    return sample


async def explicit_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, {**sampling_params, "temperature": 0.5})
    sample.sampling_turns = [{"temperature": 0.9}]
    return sample


async def says_no_temperature(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens(await ask(args, sample.tokens), [-1.0, -1.0])
    return sample


@pytest.mark.parametrize(
    ("hook", "turns"),
    [
        ("judged", [{"temperature": 0.7}]),
        ("cut_at_a_stop", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}]),
        ("says_no_temperature", [{"temperature": 1.0}]),
        ("explicit_turns", [{"temperature": 0.9}]),
    ],
)
def test_only_what_made_the_samples_tokens_counts(checkpoint: Path, hook: str, turns: list[dict[str, Any]]) -> None:
    flags = ("--custom-generate-function-path", f"{ME}.{hook}", "--rollout-temperature", "0.8")
    (sample,) = run(checkpoint, *flags)
    assert sample.sampling_turns == turns and type(sample.sampling_params) is dict
    assert build_batch([[sample]], default_temperature=0.8).sample_columns["temperature"].tolist() == pytest.approx(
        [turns[0]["temperature"]]
    )


@pytest.mark.parametrize(("mask", "kept"), [([1, 1, 1], [0.5, 0.7]), ([0, 0, 1], [0.7])])
def test_the_turns_of_a_continued_response_stay_while_its_tokens_are_trained_on(
    mask: list[int], kept: list[float]
) -> None:
    sample = Sample(tokens=[1, 7, 7, 8], response_length=3, loss_mask=mask, sampling_turns=[{"temperature": 0.5}])
    with requests_noted() as requests:
        record_turn(sample, {"temperature": 0.7})
        note_request({"temperature": 0.7}, [[8]], [1, 7, 7])
    settle(sample, requests, {"temperature": 0.9}, sample.sampling_turns, before=2)
    assert [turn["temperature"] for turn in sample.sampling_turns] == kept


def test_what_a_generate_function_says_of_its_sample_wins(checkpoint: Path) -> None:
    flags = ("--custom-generate-function-path", f"{ME}.explicit", "--rollout-temperature", "0.8")
    (sample,) = run(checkpoint, *flags)
    assert sent[0]["temperature"] == 0.5 and sample.sampling_params["temperature"] == 0.8
    assert build_batch([[sample]]).sample_columns["temperature"].tolist() == pytest.approx([0.8])


@pytest.mark.parametrize(
    ("flags", "turn"),
    [
        ((), {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (("--vllm-generation-config", "vllm"), {"temperature": 1.0}),
        (
            ("--vllm-override-generation-config", '{"temperature": 0.4, "top_k": 0}'),
            {"temperature": 0.4, "top_p": 0.95},
        ),
        (("--vllm-override-generation-config.top_p", "1"), {"temperature": 0.6, "top_k": 20}),
    ],
)
def test_without_a_temperature_the_engine_takes_its_models(
    tmp_path: Path, flags: tuple[str, ...], turn: dict[str, Any]
) -> None:
    """As Qwen3's: vLLM's routes of OpenAI begin with generation_config.json."""
    folder = make_checkpoint(tmp_path / "hf", layers=1)
    make_prompts(folder / "rows.jsonl", 2)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20}'
    )
    (sample,) = run(folder, "--custom-generate-function-path", f"{ME}.judges_by_chat", *flags)
    assert len(sent) == 2 and sample.sampling_turns == [turn]


@pytest.mark.parametrize("hook", ["hotter", "own_request"])
def test_a_sample_is_scored_at_the_temperature_that_was_sent(checkpoint: Path, hook: str) -> None:
    samples = run(checkpoint, "--custom-generate-function-path", f"{ME}.{hook}")
    assert sent[0]["temperature"] == 0.5 == samples[0].sampling_params["temperature"]
    assert samples[0].sampling_turns == [{"temperature": 0.5, "top_p": 0.9}]
    assert build_batch([samples]).sample_columns["temperature"].tolist() == [0.5]
    for flag in ("--use-tis", "--use-rollout-logprobs"):
        with pytest.raises(RolloutError, match=rf"top_p 0.9.*{flag} compares") as error:
            build_batch([samples], compares=flag)
        assert error.value.where == "group 3, sample 0"


def test_turns_of_different_temperature_are_refused(checkpoint: Path) -> None:
    samples = run(checkpoint, "--custom-generate-function-path", f"{ME}.two_turns", "--rollout-temperature", "0.7")
    with pytest.raises(RolloutError, match=r"turns were sampled at temperatures 0\.5, 0\.7"):
        build_batch([samples])
    same = run(checkpoint, "--custom-generate-function-path", f"{ME}.two_turns", "--rollout-temperature", "0.5")
    assert build_batch([same], compares="--use-tis").sample_columns["temperature"].tolist() == [0.5]


def test_a_turn_that_is_not_trained_on_may_have_any_temperature(checkpoint: Path) -> None:
    samples = run(checkpoint, "--custom-generate-function-path", f"{ME}.first_turn_masked")
    assert samples[0].loss_mask == [0, 0, 1, 1] and samples[0].sampling_turns == [{"temperature": 1.0}]


def test_siblings_may_differ(checkpoint: Path) -> None:
    samples = run(checkpoint, "--custom-generate-function-path", f"{ME}.siblings")
    assert build_batch([samples]).sample_columns["temperature"].tolist() == pytest.approx([0.5, 0.8])


def test_a_sample_that_says_nothing_has_the_temperature_of_the_run() -> None:
    sample = Sample(group_index=0, index=0, tokens=[1, 2], response_length=1, reward=0.0)
    assert build_batch([[sample]], default_temperature=0.25).sample_columns["temperature"].tolist() == [0.25]


def test_values_that_change_nothing() -> None:
    neutral = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 3}
    assert distribution_of(neutral | {"logit_bias": None, "bad_words": [], "max_tokens": 4}) == {"temperature": 0.5}
    assert distribution_of({"top_k": 20, "min_tokens": 2}) == {"temperature": 1.0, "top_k": 20, "min_tokens": 2}


def test_turns_survive_the_buffer() -> None:
    sample = Sample(sampling_turns=[{"temperature": 0.5}])
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).sampling_turns == [{"temperature": 0.5}]


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_a_continued_response_has_other_random_numbers(checkpoint: Path) -> None:
    group = group_of(2)
    samples = run(checkpoint, group=group)
    begun = [(params["seed"], params["n"]) for params in sent]  # one request for both
    assert len(begun) == 1 and begun[0][1] == 2
    for sample in samples:
        sample.status = Status.ABORTED
    run(checkpoint, group=samples)
    assert [s.response_length for s in samples] == [4, 4]
    assert [params["max_tokens"] for params in sent] == [12, 10, 10]  # the limit is that of the whole response
    assert len({begun[0][0], begun[0][0] + 1, *(params["seed"] for params in sent[1:])}) == 4
    sent.clear()
    run(checkpoint, group=group_of(2))
    assert [(params["seed"], params["n"]) for params in sent] == begun  # a rollout done again draws the same ones


async def keeps_the_seed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.status = [1, 2], Status.COMPLETED
    sample.append_response_tokens([3], [-1.0])
    sample.metadata["seed"] = sampling_params["seed"]
    return sample


async def aborted_as_in_slime(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.status = [1, 2], Status.ABORTED
    sample.append_response_tokens([3], [-1.0])
    sample.weight_versions.append("4")  # type: ignore[arg-type]
    return sample


def test_an_aborted_sample_of_a_hook_of_slimes_can_be_saved(checkpoint: Path) -> None:
    for sample in run(checkpoint, "--custom-generate-function-path", f"{ME}.aborted_as_in_slime"):
        assert sample.to_dict()["weight_versions"] == [{"version": "4", "start": 0, "end": 1}]


def test_an_evaluation_draws_other_random_numbers_than_the_training(checkpoint: Path, tmp_path: Path) -> None:
    hook = ("--custom-generate-function-path", f"{ME}.keeps_the_seed")
    names = ("a", str(make_prompts(tmp_path / "a.jsonl", 4)), "b", str(make_prompts(tmp_path / "b.jsonl", 4)))
    args = view(
        checkpoint, *hook, "--eval-interval", "1", "--eval-prompt-data", *names, "--n-samples-per-eval-prompt", "2",
        *("--input-key", "prompt", "--label-key", "label"),
    )  # fmt: skip
    seeds = [s.metadata["seed"] for n in "ab" for s in evaluate(args, 0).data[n]["samples"]]
    for index in range(4):
        group = [Sample(group_index=index, index=i, prompt="1+1=") for i in range(2)]
        seeds += [s.metadata["seed"] for s in run(checkpoint, *hook, group=group)]
    assert len(set(seeds)) == 24


def test_hooks_always_get_a_number_of_tokens(checkpoint: Path) -> None:
    assert train_sampling_params(view(checkpoint))["max_new_tokens"] == 12
    context = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    unset: Any = SimpleNamespace(**{**vars(view(checkpoint)), "rollout_max_response_len": None})
    assert train_sampling_params(unset)["max_new_tokens"] == context
    unset.vllm_max_model_len = 40
    assert train_sampling_params(unset)["max_new_tokens"] == 40
